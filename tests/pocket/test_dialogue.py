"""The dialogue generator: deterministic, in the official chat format, with right answers."""

import hashlib
import json
import pathlib
import random
import re
import subprocess
import sys
import unittest

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools" / "pocket"
sys.path.insert(0, str(TOOLS))

import dialogue  # noqa: E402
import dialogue_families as families  # noqa: E402
from dialogue_format import render, role_mask  # noqa: E402


def digest(split, count):
    body = "".join(dialogue.conversation(split, i)["text"] for i in range(count))
    return hashlib.sha256(body.encode()).hexdigest()


class Dialogues(unittest.TestCase):
    def test_deterministic_across_processes_and_order(self):
        code = f"import sys; sys.path.insert(0, {str(TOOLS)!r}); sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r}); " \
               "import test_dialogue; print(test_dialogue.digest('train', 300))"
        other = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True)
        self.assertEqual(other.stdout.strip(), digest("train", 300))
        self.assertEqual(dialogue.conversation("train", 17), dialogue.conversation("train", 17))

    def test_splits_differ(self):
        texts = [{dialogue.conversation(s, i)["text"] for i in range(200)} for s in ("train", "panel")]
        self.assertLess(len(texts[0] & texts[1]), 10)

    def test_convert_family_is_only_in_shifted(self):
        for split in ("train", "dev", "calibration", "sensitivity", "panel"):
            for i in range(500):
                self.assertNotIn("How many minutes are there in", dialogue.conversation(split, i)["text"])
        self.assertTrue(any("How many minutes are there in" in dialogue.conversation("shifted", i)["text"] for i in range(100)))

    def test_arithmetic_is_right(self):
        rng = random.Random(5)
        checked = 0
        for _ in range(3000):
            _, reasoning, answer = families.arithmetic(rng)
            for a, op, b, c in re.findall(r"(?:^|[.,] |so )(\d+) ([+*-]) (\d+) = (\d+)", f"{reasoning} {answer}"):
                self.assertEqual({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op], int(c))
                checked += 1
        self.assertGreater(checked, 1500)

    def test_retrieval_answer_is_in_the_text(self):
        rng = random.Random(6)
        for _ in range(300):
            ask, _, answer = families.retrieval(rng)
            self.assertIn(answer, ask)

    def test_json_answers_parse(self):
        rng = random.Random(7)
        for _ in range(300):
            for message in dialogue.json_conversation(rng):
                if message["role"] == "assistant":
                    json.loads(message["content"])

    def test_worked_examples_of_the_format(self):
        bos, eos, user, header = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
        chat = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "ok", "calls": [("now", {})]},
                {"role": "tool", "content": "12:00"}, {"role": "assistant", "content": "noon"}]
        d = "｜DSML｜"
        self.assertEqual(render(chat), f'{bos}{user}go{header}</think>ok\n\n<{d} calls>\n<{d} invoke name="now">\n\n</{d} invoke>\n</{d} calls>'
                                       f"{eos}{user}<tool_result>12:00</tool_result>{header}</think>noon{eos}")
        line = "<｜System｜>Reasoning Effort: 50 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
        talk = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "A.", "reasoning": "think A"},
                {"role": "user", "content": "b?"}, {"role": "assistant", "content": "B.", "reasoning": "think B"}]
        self.assertEqual(render(talk, True, 50), f"{bos}{line}{user}a?{header}</think>A.{eos}{user}b?{header}<think>think B</think>B.{eos}")
        with self.assertRaises(ValueError):
            render([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}])
        with self.assertRaises(ValueError):
            render([{"role": "developer", "content": "x"}])

    def test_role_mask(self):
        special = {"<｜Assistant｜>": 10, "<think>": 11, "</think>": 12, "<｜end▁of▁sentence｜>": 1}
        ids = [0, 9, 50, 10, 12, 60, 61, 1, 9, 51, 10, 11, 70, 12, 62, 1, 9, 52, 10, 12]
        self.assertEqual(role_mask(ids, special), [0, 0, 0, 0, 0, 2, 2, 2, 0, 0, 0, 0, 1, 1, 2, 2, 0, 0, 0, 0])


if __name__ == "__main__":
    unittest.main()
