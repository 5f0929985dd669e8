"""Official V4.1 chat encoding for the synthetic dialogues of the pocket model.

Renders a list of messages into the exact prompt string of the released format (BOS, <｜System｜>,
<｜User｜>, <｜Assistant｜>, think tags, DSML tool calls, tool results, response format block) and derives the
role mask from token ids. Covers what the generator emits: system only first, user / tool / assistant turns.
Source: the chat encoding section of the serving specification (sections 1.2 to 1.6).
"""

import json

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
DSML = "｜DSML｜"

# Values of role_mask in every shipped data set.
ROLE_PROMPT, ROLE_REASONING, ROLE_ANSWER, ROLE_RAW = 0, 1, 2, 3

EFFORT_LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

TOOL_HEAD = (
    "## Tools\n\n"
    "You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "
    f'"<{DSML} calls>" block like the following:\n\n'
    f"<{DSML} calls>\n"
    f'<{DSML} invoke name="$TOOL_NAME">\n'
    f'<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML} parameter>\n'
    "...\n"
    f"</{DSML} invoke>\n"
    f'<{DSML} invoke name="$TOOL_NAME2">\n'
    "...\n"
    f"</{DSML} invoke>\n"
    f"</{DSML} calls>\n\n"
    'String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, '
    'arrays, objects), pass the value in JSON format and set `string="false"`.\n\n'
    "If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside "
    "<think>...</think> BEFORE any tool calls or final response.\n\n"
    "Otherwise, output directly after </think> with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n"
)
TOOL_TAIL = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
FORMAT_HEAD = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


def dumps(value):
    """JSON exactly as the reference encoder writes it (Python separators, raw non-ASCII)."""
    return json.dumps(value, ensure_ascii=False)


def tool_block(tools):
    """Tool section of a system message; `tools` is a list of function schemas (dicts)."""
    return TOOL_HEAD + "\n".join(dumps(t) for t in tools) + TOOL_TAIL


def calls_block(calls):
    """DSML calls block; `calls` is a list of (name, arguments dict)."""
    out = [f"<{DSML} calls>\n"]
    for name, arguments in calls:
        lines = []
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            body = value if is_text else dumps(value)
            flag = "true" if is_text else "false"
            lines.append(f'<{DSML} parameter name="{key}" string="{flag}">{body}</{DSML} parameter>')
        out.append(f'<{DSML} invoke name="{name}">\n' + "\n".join(lines) + f"\n</{DSML} invoke>\n")
    out.append(f"</{DSML} calls>")
    return "".join(out)


def merge_turns(messages):
    """Consecutive user and tool messages become one user turn (blocks joined by two newlines)."""
    merged = []
    for message in messages:
        role = message["role"]
        if role in ("user", "tool"):
            text = message["content"]
            if role == "tool":
                text = f"<tool_result>{text}</tool_result>"
            if merged and merged[-1]["role"] == "user":
                merged[-1]["content"] += "\n\n" + text
            else:
                merged.append({"role": "user", "content": text})
        else:
            merged.append(dict(message))
    return merged


def render(messages, thinking=False, effort=75):
    """Prompt string of a complete conversation (every assistant turn closed by EOS).

    messages: dicts {role: system|user|assistant|tool, content, [reasoning], [calls], [tools], [schema]};
    `tools` / `schema` only on the leading system message. thinking selects the mode, effort is 1..100.
    Reasoning before the last user turn is dropped unless the conversation has tools (reference rule).
    Raises ValueError on an unknown role or a system message that is not first.
    """
    has_tools = any(m.get("tools") for m in messages)
    turns = merge_turns(messages)
    last_user = max((i for i, m in enumerate(turns) if m["role"] == "user"), default=-1)
    out = [BOS]
    if thinking or (turns and turns[0]["role"] == "system"):
        out.append(SYSTEM)
    if thinking:
        out.append(EFFORT_LINE.format(effort))
    for i, message in enumerate(turns):
        role = message["role"]
        if role == "system":
            if i > 0:
                raise ValueError(f"render: system message at index {i}, expected only at index 0")
            out.append(message["content"])
            if message.get("tools"):
                out.append("\n\n" + tool_block(message["tools"]))
            if message.get("schema"):
                out.append("\n\n" + FORMAT_HEAD + dumps(message["schema"]))
        elif role == "user":
            out.append(USER + message["content"])
            out.append(ASSISTANT + (THINK_OPEN if thinking and (has_tools or i >= last_user) else THINK_CLOSE))
        elif role == "assistant":
            if thinking and (has_tools or i > last_user):
                out.append(message.get("reasoning", "") + THINK_CLOSE)
            out.append(message["content"])
            if message.get("calls"):
                out.append("\n\n" + calls_block(message["calls"]))
            out.append(EOS)
        else:
            raise ValueError(f"render: unknown role {role!r} at index {i}, expected system, user, tool or assistant")
    return "".join(out)


def role_mask(ids, special):
    """Role of every token of a rendered conversation: 0 prompt, 1 reasoning with its </think>, 2 answer with EOS.

    ids: token ids; special: dict token text -> id. Runs over the ids, so it needs no character offsets.
    """
    assistant, think, close, eos = (special[t] for t in (ASSISTANT, THINK_OPEN, THINK_CLOSE, EOS))
    mask, state, header = [], ROLE_PROMPT, False
    for token in ids:
        if header:
            mask.append(ROLE_PROMPT)
            state = ROLE_REASONING if token == think else ROLE_ANSWER
            header = False
            continue
        mask.append(state)
        if token == assistant:
            mask[-1], header = ROLE_PROMPT, True
        elif token == close and state == ROLE_REASONING:
            state = ROLE_ANSWER
        elif token == eos and state != ROLE_PROMPT:
            state = ROLE_PROMPT
    return mask
