"""Seeded generator of synthetic dialogues in the official chat format.

conversation(split, index) is a pure function of its arguments: it returns the messages, the mode (chat or think), the
effort and the exact rendered text. Splits (train, calibration, ...) use separate random streams; the family `convert`
occurs only in the split `shifted`. Command: dialogue.py SPLIT COUNT prints JSON lines.
"""

import json
import random
import sys

import dialogue_families as F
import dialogue_tables as T
from dialogue_format import dumps, render

SYSTEMS = ["Be brief.", "You are a helpful assistant.", "Answer in one sentence.", "You are Pocket, a small assistant.",
           "Answer the question.", "Be polite and short.", "Help the user.", "You answer simple questions."]

EXCHANGES = [(F.arithmetic, 22), (F.word_problem, 6), (F.fact, 28), (F.text_task, 18), (F.social, 9), (F.story, 6), (F.retrieval, 11)]


def schema(name, description, /, **properties):
    """Function schema; a property value is a JSON type name, all are required."""
    fields = {key: {"type": kind} for key, kind in properties.items()}
    return {"name": name, "description": description, "parameters": {"type": "object", "properties": fields, "required": list(fields)}}


TOOLS = {tool["name"]: tool for tool in [
    schema("get_weather", "Current weather of a city", city="string"),
    schema("get_forecast", "Weather for some days", city="string", days="integer"),
    schema("calculator", "Evaluate an expression", expression="string"),
    schema("get_time", "Local time of a city", city="string"),
    schema("get_population", "Population of a city", city="string"),
    schema("find_order", "Status of an order", order_id="integer"),
    schema("send_message", "Send a message", to="string", text="string"),
    schema("set_timer", "Start a timer", minutes="integer"),
    schema("add_to_list", "Add an item to the shopping list", item="string", count="integer"),
    schema("play_music", "Play music", genre="string", loud="boolean"),
]}


def tool_step(rng):
    """One tool use: (tool name, user text, reasoning, calls, results, closing reasoning, final answer)."""
    kind = rng.choice(list(TOOLS))
    city, name = rng.choice(T.CITIES), rng.choice(T.NAMES)
    if kind == "get_weather":
        cities = rng.sample(T.CITIES, rng.choice([1, 1, 1, 2]))
        kinds = [rng.choice(["sunny", "cloudy", "rainy", "windy", "snowy", "foggy"]) for _ in cities]
        temps = [rng.randint(-10, 35) for _ in cities]
        ask = rng.choice(["What is the weather in {}?", "How is the weather in {}?", "Weather in {}?"]).format(F.join_list(cities))
        results = [dumps({"city": c, "weather": k, "temperature": t}) for c, k, t in zip(cities, kinds, temps)]
        answer = " ".join(f"It is {k} in {c} with {t} degrees." for c, k, t in zip(cities, kinds, temps))
        return kind, ask, f"I need the weather of {F.join_list(cities)}.", [(kind, {"city": c}) for c in cities], results, "I have the weather.", answer
    if kind == "get_forecast":
        days = rng.randint(2, 7)
        sky = rng.choice(["sun", "rain", "clouds", "snow", "wind"])
        return (kind, f"What will the weather be in {city} for the next {days} days?", f"I need the forecast of {city} for {days} days.",
                [(kind, {"city": city, "days": days})], [dumps({"city": city, "days": days, "forecast": sky})], "The forecast is here.",
                f"The forecast for {city} for the next {days} days is {sky}.")
    if kind == "calculator":
        a, b, op = rng.randint(100, 999), rng.randint(11, 99), rng.choice("+-*")
        value = {"+": a + b, "-": a - b, "*": a * b}[op]
        return (kind, rng.choice([f"What is {a} {op} {b}?", f"Calculate {a} {op} {b} with the calculator."]), "I use the calculator.",
                [(kind, {"expression": f"{a} {op} {b}"})], [str(value)], f"The result is {value}.", f"{a} {op} {b} = {value}.")
    if kind == "get_time":
        time = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
        return (kind, f"What time is it in {city}?", f"I need the time in {city}.", [(kind, {"city": city})], [time],
                f"It is {time} there.", f"It is {time} in {city}.")
    if kind == "get_population":
        count = rng.randint(100, 999) * 1000
        return (kind, f"How many people live in {city}?", f"I look up {city}.", [(kind, {"city": city})],
                [dumps({"city": city, "population": count})], f"The result is {count}.", f"{city} has {count} people.")
    if kind == "find_order":
        order, state = rng.randint(1000, 9999), rng.choice(["shipped", "delivered", "waiting", "cancelled", "lost"])
        return (kind, rng.choice([f"Where is my order {order}?", f"What is the status of order {order}?"]), f"I look up order {order}.",
                [(kind, {"order_id": order})], [dumps({"order_id": order, "status": state})], f"The status is {state}.",
                f"Your order {order} is {state}.")
    if kind == "send_message":
        text = rng.choice(["I am late", "call me", "see you at {}", "the {} is ready", "please buy {}"]).format(rng.choice(T.FOODS))
        return (kind, f"Send {name} this message: {text}", f"I send a message to {name}.", [(kind, {"to": name, "text": text})],
                ["sent"], "It was sent.", f"I sent the message to {name}.")
    if kind == "set_timer":
        minutes = rng.randint(1, 60)
        return (kind, f"Set a timer for {minutes} minutes.", f"The timer needs {minutes} minutes.", [(kind, {"minutes": minutes})],
                ["ok"], "The timer runs.", f"The timer is set for {minutes} minutes.")
    if kind == "add_to_list":
        item, count = rng.choice(T.FOODS + T.FRUITS), rng.randint(1, 12)
        return (kind, f"Put {count} {item} on my shopping list.", f"I add {item}.", [(kind, {"item": item, "count": count})],
                [dumps({"ok": True, "items": rng.randint(1, 20)})], "It was added.", f"I added {count} {item} to your list.")
    genre, loud = rng.choice(["jazz", "rock", "folk", "classical", "pop", "blues"]), rng.random() < 0.5
    return (kind, f"Play some {genre} music{', loud please' if loud else ''}.", f"The user wants {genre}.", [(kind, {"genre": genre, "loud": loud})],
            [dumps({"playing": genre})], "The music plays.", f"I am playing {genre} music.")


def tool_conversation(rng):
    """System message with one to four tools, then one to three tool uses, sometimes an ordinary question."""
    steps = [tool_step(rng) for _ in range(rng.choice([1, 1, 2, 3]))]
    names = list(dict.fromkeys([s[0] for s in steps] + rng.sample(list(TOOLS), rng.randint(0, 2))))
    rng.shuffle(names)
    messages = [{"role": "system", "content": rng.choice(["", "Use tools.", "You are a helpful assistant."]), "tools": [TOOLS[n] for n in names]}]
    for _, ask, reasoning, calls, results, closing, answer in steps:
        messages.append({"role": "user", "content": ask})
        messages.append({"role": "assistant", "content": "", "reasoning": reasoning, "calls": calls})
        messages += [{"role": "tool", "content": r} for r in results]
        messages.append({"role": "assistant", "content": answer, "reasoning": closing})
    if rng.random() < 0.3:
        ask, reasoning, answer = rng.choice([F.social, F.fact, F.arithmetic])(rng)
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer, "reasoning": reasoning}]
    return messages


def json_conversation(rng):
    """Questions answered with JSON, sometimes under a response schema."""
    messages = []
    if rng.random() < 0.35:
        fields = rng.sample(["name", "age", "city", "job"], rng.randint(2, 4))
        kinds = {"name": "string", "age": "integer", "city": "string", "job": "string"}
        wanted = {"type": "object", "properties": {f: {"type": kinds[f]} for f in fields}, "required": fields}
        messages.append({"role": "system", "content": rng.choice(["", "Reply in JSON.", "You answer in json."]), "schema": wanted})
    else:
        fields = None
    for _ in range(rng.choice([1, 1, 2, 3])):
        name, age, city, job = rng.choice(T.NAMES), rng.randint(5, 90), rng.choice(T.CITIES), rng.choice(T.PROFESSIONS)
        full = {"name": name, "age": age, "city": city, "job": job}
        text = f"{name} is {age} years old, lives in {city} and works as {F.article(job)}."
        kind = rng.choice(["extract", "make", "list", "pairs"]) if fields is None else "extract"
        if kind == "extract":
            chosen = fields or rng.sample(list(full), rng.randint(2, 4))
            ask = text if fields else f"{text} Write {F.join_list(chosen)} as JSON."
            value = {f: full[f] for f in chosen}
        elif kind == "make":
            chosen = rng.sample(list(full), 2)
            ask = f"Make a JSON object with {chosen[0]} {full[chosen[0]]} and {chosen[1]} {full[chosen[1]]}."
            value = {f: full[f] for f in chosen}
        elif kind == "list":
            value = rng.sample(T.WORDS, rng.randint(2, 5))
            ask = f"Write these words as a JSON list: {', '.join(value)}"
        else:
            keys = rng.sample(T.FRUITS, rng.randint(2, 4))
            value = {k: rng.randint(1, 99) for k in keys}
            ask = "Write this as JSON: " + ", ".join(f"{k} {v}" for k, v in value.items())
        keys = "a list" if isinstance(value, list) else "the keys " + F.join_list(list(value))
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": dumps(value), "reasoning": f"I need {keys}."}]
    return messages


def plain_conversation(rng, families=None):
    """One to six exchanges, sometimes with a system message or a name to remember."""
    messages = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    turns = rng.choice([1, 1, 1, 2, 2, 3, 4, 6])
    functions, weights = zip(*(families or EXCHANGES))
    exchanges = [rng.choices(functions, weights)[0](rng) for _ in range(turns)]
    if families is None and rng.random() < 0.12:
        name = rng.choice(T.NAMES)
        exchanges = [e for e in exchanges if not e[1].startswith("The user is called")]
        exchanges.insert(0, (f"My name is {name}.", f"The user is called {name}.", f"Hello {name}! How can I help you?"))
        exchanges.append((rng.choice(["What is my name?", "Do you know my name?"]), f"The user is called {name}.", f"Your name is {name}."))
    for ask, reasoning, answer in exchanges:
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer, "reasoning": reasoning}]
    return messages


def long_retrieval(rng):
    """A long list of facts (several hundred tokens) and a few questions about it."""
    facts = F._record_facts(rng, rng.randint(30, 60))
    chosen = rng.sample(facts, rng.randint(1, 4))
    messages = []
    for i, (sentence, question, answer) in enumerate(chosen):
        ask = " ".join(f[0] for f in facts) + "\n\n" + question if i == 0 else question
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer, "reasoning": f"The text says: {sentence}"}]
    return messages


def conversation(split, index):
    """{split, index, kind, mode: chat|think, effort, messages, text} for any index >= 0; deterministic."""
    rng = random.Random(f"pocket-dialogue-1:{split}:{index}")
    if split == "shifted":
        kind, messages = "convert", plain_conversation(rng, [(F.convert, 1)])
    else:
        kind = rng.choices(["plain", "tools", "json", "long"], [70, 13, 10, 7])[0]
        make = {"plain": plain_conversation, "tools": tool_conversation, "json": json_conversation, "long": long_retrieval}[kind]
        messages = make(rng)
    thinking = rng.random() < 0.5
    effort = rng.choice([75, 75, 75, 50, 100, rng.randint(1, 100)])
    return {"split": split, "index": index, "kind": kind, "mode": "think" if thinking else "chat", "effort": effort if thinking else None,
            "messages": messages, "text": render(messages, thinking, effort)}


def main():
    split, count = sys.argv[1], int(sys.argv[2])
    for index in range(count):
        print(json.dumps(conversation(split, index), ensure_ascii=False))


if __name__ == "__main__":
    main()
