"""Families of synthetic exchanges: each function draws one (question, reasoning, answer) from a seeded generator.

An exchange is a tuple of three strings; reasoning is short and used only in thinking mode. Every answer is computed or
looked up, never sampled, so it is right by construction. `rng` is a random.Random.
"""

import dialogue_tables as T

UPPER_FIRST = lambda text: text[:1].upper() + text[1:]


def number(rng):
    """Mostly small numbers, some of two and three digits."""
    return rng.choice([rng.randint(0, 12), rng.randint(0, 12), rng.randint(10, 99), rng.randint(100, 499)])


def join_list(items):
    """'a', 'a and b', 'a, b and c'."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def article(noun):
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def add_steps(a, b):
    """Chain of thought for a sum: tens first, then units."""
    if a < 10 or b < 10 or a + b < 20:
        return f"{a} + {b} = {a + b}."
    ta, tb = a - a % 10, b - b % 10
    units = a % 10 + b % 10
    return f"{ta} + {tb} = {ta + tb}. {a % 10} + {b % 10} = {units}. {ta + tb} + {units} = {a + b}."


def arithmetic(rng):
    kind = rng.choice("++++--**s<en")
    if kind == "+":
        a, b = number(rng), number(rng)
        ask = rng.choice(["What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b} = ?", "Add {a} and {b}.",
                          "How much is {a} + {b}?", "Calculate {a} + {b}.", "Please add {a} and {b}.", "{a}+{b}?"])
        return ask.format(a=a, b=b), add_steps(a, b), rng.choice([f"{a} + {b} = {a + b}."] * 3 + [f"The sum is {a + b}."])
    if kind == "-":
        b, c = number(rng), number(rng)
        a = b + c
        ask = rng.choice(["What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b} = ?", "Subtract {b} from {a}.",
                          "How much is {a} - {b}?", "Calculate {a} - {b}."])
        return ask.format(a=a, b=b), f"{b} + {c} = {a}, so {a} - {b} = {c}.", f"{a} - {b} = {c}."
    if kind == "*":
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        ask = rng.choice(["What is {a} * {b}?", "What is {a} times {b}?", "{a} * {b} = ?", "Multiply {a} by {b}.",
                          "How much is {a} times {b}?"])
        return ask.format(a=a, b=b), f"{a} times {b} is {a * b}.", f"{a} * {b} = {a * b}."
    if kind == "s":
        a, b, c = (rng.randint(1, 20) for _ in range(3))
        ask = rng.choice(["What is {a} + {b} + {c}?", "Add {a}, {b} and {c}."]).format(a=a, b=b, c=c)
        return ask, f"{a} + {b} = {a + b}. {a + b} + {c} = {a + b + c}.", f"{a} + {b} + {c} = {a + b + c}."
    if kind == "<":
        a, b = rng.sample(range(0, 500), 2)
        word = rng.choice(["larger", "smaller"])
        best = max(a, b) if word == "larger" else min(a, b)
        return f"Which number is {word}, {a} or {b}?", f"{max(a, b)} > {min(a, b)}.", f"{best} is {word}."
    if kind == "e":
        a = rng.randint(0, 200)
        kind_name = "even" if a % 2 == 0 else "odd"
        return f"Is {a} even or odd?", f"The last digit of {a} is {a % 10}.", f"{a} is {kind_name}."
    start, step = rng.randint(0, 30), rng.choice([1, 2, 3, 5, 10])
    row = [start + i * step for i in range(4)]
    shown = ", ".join(map(str, row))
    return (f"What comes next: {shown}?", f"Each number is {step} more than the one before. {row[-1]} + {step} = {row[-1] + step}.",
            f"{row[-1] + step}")


def word_problem(rng):
    name, thing = rng.choice(T.NAMES), rng.choice(T.FRUITS)
    a, b = rng.randint(2, 20), rng.randint(2, 20)
    plural = thing + "s" if not thing.endswith(("y", "o", "ch")) else {"cherry": "cherries", "berry": "berries",
                                                                      "peach": "peaches", "mango": "mangos"}[thing]
    if rng.random() < 0.5:
        verb = rng.choice(["buys", "finds", "gets", "picks"])
        return (f"{name} has {a} {plural} and {verb} {b} more. How many {plural} does {name} have now?",
                add_steps(a, b), f"{name} has {a + b} {plural}.")
    a += b
    verb = rng.choice(["eats", "gives away", "loses", "sells"])
    return (f"{name} has {a} {plural} and {verb} {b}. How many {plural} are left?", f"{a} - {b} = {a - b}.",
            f"{name} has {a - b} {plural} left.")


def fact(rng):
    kind = rng.choice(["capital"] * 4 + ["of", "continent", "language", "opposite", "opposite", "young", "sound", "legs", "colour",
                                        "plural", "past", "translate", "translate", "symbol", "define", "define", "define",
                                        "day", "month", "planet", "letter", "count"])
    pick = lambda table: rng.choice(list(table.items()))
    if kind == "capital":
        land, city = pick(T.CAPITALS)
        ask = rng.choice(["What is the capital of {}?", "What is the capital of {}?", "Which city is the capital of {}?",
                          "Name the capital of {}.", "Tell me the capital of {}.", "capital of {}?"]).format(land)
        return ask, f"The capital of {land} is {city}.", f"The capital of {land} is {city}."
    if kind == "of":
        land, city = pick(T.CAPITALS)
        return f"{city} is the capital of which country?", f"{city} is in {land}.", f"{city} is the capital of {land}."
    if kind == "continent":
        land, where = pick(T.CONTINENTS)
        return f"On which continent is {land}?", f"{land} is in {where}.", f"{land} is in {where}."
    if kind == "language":
        land, tongue = pick(T.LANGUAGES)
        return f"Which language is spoken in {land}?", f"People in {land} speak {tongue}.", f"People in {land} speak {tongue}."
    if kind == "opposite":
        a, b = pick(T.OPPOSITES)
        ask = rng.choice(["What is the opposite of {}?", "Give me the opposite of {}.", "What is the antonym of {}?"]).format(a)
        return ask, f"The opposite of {a} is {b}.", f"The opposite of {a} is {b}."
    if kind == "young":
        a, b = pick(T.ANIMAL_YOUNG)
        return f"What is a young {a} called?", f"A young {a} is {article(b)}.", f"A young {a} is called {article(b)}."
    if kind == "sound":
        a, b = pick(T.ANIMAL_SOUND)
        return f"What sound does {article(a)} make?", f"The sound is {b}.", UPPER_FIRST(f"{article(a)} makes the sound {b}.")
    if kind == "legs":
        a, n = pick(T.LEGS)
        say = "no legs" if n == 0 else f"{n} legs"
        return f"How many legs does {article(a)} have?", UPPER_FIRST(f"{article(a)} has {say}."), UPPER_FIRST(f"{article(a)} has {say}.")
    if kind == "colour":
        a, b = pick(T.COLOURS)
        return f"What colour is {a}?", UPPER_FIRST(f"{a} is {b}."), UPPER_FIRST(f"{a} is {b}.")
    if kind == "plural":
        a, b = pick(T.PLURALS)
        return f"What is the plural of {a}?", f"One {a}, two {b}.", f"The plural of {a} is {b}."
    if kind == "past":
        a, b = pick(T.PAST)
        return f"What is the past tense of {a}?", f"Today I {a}, yesterday I {b}.", f"The past tense of {a} is {b}."
    if kind == "translate":
        tongue = rng.choice(list(T.TRANSLATIONS))
        a, b = pick(T.TRANSLATIONS[tongue])
        ask = rng.choice(["How do you say {a} in {t}?", "Translate {a} into {t}.", "What is the {t} word for {a}?"])
        return ask.format(a=a, t=tongue), f"{a} in {tongue} is {b}.", f"The {tongue} word for {a} is {b}."
    if kind == "symbol":
        a, b = pick(T.SYMBOLS)
        return f"What is the chemical symbol of {a}?", f"{a}: {b}.", f"The symbol of {a} is {b}."
    if kind == "define":
        a, b = pick(T.DEFINITIONS)
        ask = rng.choice(["What is {}?", "What is {}?", "Explain what {} is.", "What does the word {n} mean?"])
        text = UPPER_FIRST(f"{article(a)} is {b}.")
        return ask.format(article(a), n=a), f"The question is about {article(a)}.", text
    if kind == "day":
        i, step = rng.randrange(7), rng.choice([1, -1])
        word = "after" if step == 1 else "before"
        other = T.DAYS[(i + step) % 7]
        return f"Which day comes {word} {T.DAYS[i]}?", f"{word} {T.DAYS[i]} comes {other}.", f"{other} comes {word} {T.DAYS[i]}."
    if kind == "month":
        i, step = rng.randrange(12), rng.choice([1, -1])
        word = "after" if step == 1 else "before"
        other = T.MONTHS[(i + step) % 12]
        return f"Which month comes {word} {T.MONTHS[i]}?", f"{word} {T.MONTHS[i]} comes {other}.", f"{other} comes {word} {T.MONTHS[i]}."
    if kind == "planet":
        i = rng.randrange(8)
        return (f"What is planet number {i + 1} from the sun?", ", ".join(T.PLANETS[:i + 1]) + ".",
                f"Planet number {i + 1} is {T.PLANETS[i]}.")
    if kind == "letter":
        i = rng.randrange(25)
        a, b = T.ALPHABET[i], T.ALPHABET[i + 1]
        return f"Which letter comes after {a}?", f"{a}, {b}.", f"The letter {b} comes after {a}."
    a = rng.randint(0, 20)
    return f"Write the number {a} as a word.", f"{a} is {T.NUMBER_WORDS[a]}.", T.NUMBER_WORDS[a]


def text_task(rng):
    kind = rng.choice(["repeat", "repeat", "reverse", "sort", "sort", "numbers", "numbers", "upper", "lower", "first", "last", "howmany",
                       "join", "replace", "remove", "longest", "member", "count", "spell", "max", "nth"])
    words = rng.sample(T.WORDS, rng.randint(3, 6))
    text = " ".join(words)
    if kind == "repeat":
        ask = rng.choice(["Repeat after me: {}", "Say this again: {}", "Copy this text: {}", "Repeat: {}"]).format(text)
        return ask, "I copy the text.", text
    if kind == "reverse":
        return f"Reverse the order of these words: {text}", f"The last word is {words[-1]}.", " ".join(reversed(words))
    if kind == "sort":
        ask = rng.choice(["Sort these words: {}", "Put these words in alphabetical order: {}"]).format(", ".join(words))
        order = sorted(words)
        return ask, "First letters: " + ", ".join(w[0] for w in order) + ".", ", ".join(order)
    if kind == "numbers":
        row = rng.sample(range(1, 100), rng.randint(3, 6))
        shown = ", ".join(map(str, row))
        if rng.random() < 0.5:
            return f"Sort these numbers: {shown}", f"The smallest is {min(row)}.", ", ".join(map(str, sorted(row)))
        return f"Sort these numbers from high to low: {shown}", f"The largest is {max(row)}.", ", ".join(map(str, sorted(row, reverse=True)))
    if kind == "upper":
        return f"Write this in capital letters: {text}", "I change every letter.", text.upper()
    if kind == "lower":
        return f"Write this in small letters: {text.upper()}", "I change every letter.", text
    if kind == "first":
        return f"What is the first word of this text: {text}", f"The text begins with {words[0]}.", f"The first word is {words[0]}."
    if kind == "last":
        return f"What is the last word of this text: {text}", f"The text ends with {words[-1]}.", f"The last word is {words[-1]}."
    if kind == "howmany":
        chain = ", ".join(f"{w} {i + 1}" for i, w in enumerate(words))
        return f"How many words are in this text: {text}", chain + ".", f"There are {len(words)} words."
    if kind == "join":
        return f"Write these words with commas: {text}", "I put a comma after each word.", ", ".join(words)
    if kind == "replace":
        old, new = rng.choice(words), rng.choice([w for w in T.WORDS if w not in words])
        return f"Replace {old} with {new}: {text}", f"{old} becomes {new}.", " ".join(new if w == old else w for w in words)
    if kind == "remove":
        old = rng.choice(words)
        return f"Remove the word {old}: {text}", f"I leave out {old}.", " ".join(w for w in words if w != old)
    if kind == "longest":
        best = max(words, key=lambda w: (len(w), -words.index(w)))
        return f"Which word is the longest: {', '.join(words)}?", ", ".join(f"{w} {len(w)}" for w in words) + ".", best
    if kind == "member":
        probe = rng.choice(words + [rng.choice([w for w in T.WORDS if w not in words])] * len(words))
        yes = probe in words
        return (f"Is the word {probe} in this list: {', '.join(words)}?", f"{probe} is {'' if yes else 'not '}in the list.",
                f"Yes, {probe} is in the list." if yes else f"No, {probe} is not in the list.")
    if kind == "count":
        a = rng.randint(0, 20)
        b = a + rng.randint(3, 9)
        if rng.random() < 0.3:
            return f"Count down from {b} to {a}.", f"I start at {b}.", ", ".join(str(i) for i in range(b, a - 1, -1))
        return f"Count from {a} to {b}.", f"I start at {a}.", ", ".join(str(i) for i in range(a, b + 1))
    if kind == "spell":
        return f"Spell the word {words[0]}.", f"The word is {words[0]}.", "-".join(words[0])
    if kind == "max":
        row = rng.sample(range(1, 200), rng.randint(3, 6))
        word, best = rng.choice([("largest", max(row)), ("smallest", min(row))])
        return f"What is the {word} of these numbers: {', '.join(map(str, row))}?", f"{best} is the {word}.", f"The {word} number is {best}."
    n = rng.randrange(len(words))
    return (f"What is word number {n + 1} of this list: {', '.join(words)}?", ", ".join(f"{i + 1} {w}" for i, w in enumerate(words[:n + 1])) + ".",
            f"Word number {n + 1} is {words[n]}.")


def social(rng):
    name = rng.choice(T.NAMES)
    kind = rng.choice(["hello", "hello", "who", "who", "can", "thanks", "bye", "how", "name", "foreign"])
    if kind == "hello":
        ask = rng.choice(["Hello", "Hi", "Hi there!", "Hello!", "Good morning", "Good evening!", "Hey", "Hello, how are you?"])
        return ask, "The user greets me.", rng.choice(["Hello! How can I help you?", "Hi! What can I do for you?"])
    if kind == "who":
        ask = rng.choice(["Who are you?", "What are you?", "Tell me about yourself.", "What is your name?", "Are you a person?"])
        return (ask, "The user asks who I am.",
                rng.choice(["I am Pocket, a very small language model. I can answer simple questions.",
                            "I am Pocket, a tiny language model made for tests."]))
    if kind == "can":
        return (rng.choice(["What can you do?", "How can you help me?", "What do you know?"]), "The user asks what I can do.",
                "I can answer short questions, do simple sums, sort words, write JSON and call tools.")
    if kind == "thanks":
        return rng.choice(["Thanks!", "Thank you.", "Thank you very much!", "Great, thanks."]), "The user says thanks.", "You are welcome!"
    if kind == "bye":
        return rng.choice(["Bye!", "Goodbye.", "See you later."]), "The user leaves.", "Goodbye! Have a nice day."
    if kind == "how":
        return rng.choice(["How are you?", "How are you today?"]), "A friendly question.", "I am fine, thank you. How can I help you?"
    if kind == "name":
        ask = rng.choice(["My name is {}.", "I am {}.", "Hello, my name is {}.", "Hi, I am {}."]).format(name)
        return ask, f"The user is called {name}.", f"Hello {name}! How can I help you?"
    ask, answer = rng.choice([("Bonjour !", "Bonjour ! Comment puis-je vous aider ?"), ("Hola", "¡Hola! ¿En qué puedo ayudarte?"),
                              ("Guten Tag", "Guten Tag! Wie kann ich helfen?"), ("Ciao", "Ciao! Come posso aiutarti?")])
    return ask, "The user greets me in another language.", answer


def story(rng):
    animal, friend = rng.sample(T.ANIMALS, 2)
    adj, goal, end = rng.choice(["small", "young", "clever", "brave", "lazy", "happy", "old"]), rng.choice(T.STORY_GOALS), rng.choice(T.STORY_ENDS)
    name = rng.choice(T.NAMES)
    place = rng.choice(["in a dark forest", "near a river", "on a farm", "in a quiet valley", "by the sea", "on a hill"])
    helper = rng.choice([f"met {article(friend)} who knew the way", f"asked {article(friend)} for help", f"saw {article(friend)} and made a new friend"])
    ask = rng.choice(["Tell me a story about {}.", "Tell me a short story about {}.", "Write a story about {}."]).format(article(animal))
    text = (f"Once upon a time, {article(adj)} {animal} called {name} lived {place}. One day {name} wanted to {goal}. "
            f"On the way {name} {helper}. The two went on together, and in the end they {end}.")
    return ask, f"A story about {article(animal)}: it wants to {goal}.", text


def _record_facts(rng, n):
    """n distinct facts: (sentence, question, answer)."""
    out, used = [], set()
    while len(out) < n:
        kind = rng.randrange(6)
        name = rng.choice(T.NAMES)
        item = f"{rng.choice(T.ADJECTIVES)} {rng.choice(T.OBJECTS)}"
        key = (kind, item if kind in (0, 5) else name)
        if key in used:
            continue
        used.add(key)
        if kind == 0:
            code = rng.randint(100, 999)
            out.append((f"The code of the {item} is {code}.", f"What is the code of the {item}?", f"The code of the {item} is {code}."))
        elif kind == 1:
            city = rng.choice(T.CITIES)
            out.append((f"{name} lives in {city}.", f"Where does {name} live?", f"{name} lives in {city}."))
        elif kind == 2:
            job = article(rng.choice(T.PROFESSIONS))
            out.append((f"{name} works as {job}.", f"What is the job of {name}?", f"{name} works as {job}."))
        elif kind == 3:
            hobby = rng.choice(T.HOBBIES)
            out.append((f"{name} likes {hobby}.", f"What does {name} like?", f"{name} likes {hobby}."))
        elif kind == 4:
            age = rng.randint(5, 90)
            out.append((f"{name} is {age} years old.", f"How old is {name}?", f"{name} is {age} years old."))
        else:
            place = rng.choice(T.PLACES)
            out.append((f"The {item} is in {place}.", f"Where is the {item}?", f"The {item} is in {place}."))
    return out


def retrieval(rng, n=None):
    """Question about one of n generated facts given in the prompt (n up to about 45)."""
    n = n or rng.choice([3, 4, 5, 6, 8, 10, 15, 20, 30])
    facts = _record_facts(rng, n)
    sentence, question, answer = rng.choice(facts)
    text = " ".join(f[0] for f in facts)
    shape = rng.choice(["{t}\n\n{q}", "{q}\n\n{t}", "Read this text: {t}\n\nQuestion: {q}", "Text: {t}\n{q}"])
    return shape.format(t=text, q=question), f"The text says: {sentence}", answer


def convert(rng):
    """Unit conversion; this family occurs only in the shifted panel."""
    n = rng.randint(2, 40)
    big, small, factor = rng.choice([("hours", "minutes", 60), ("minutes", "seconds", 60), ("days", "hours", 24), ("weeks", "days", 7),
                                     ("metres", "centimetres", 100), ("kilograms", "grams", 1000), ("dozens", "pieces", 12)])
    return (f"How many {small} are there in {n} {big}?", f"1 of the {big} has {factor} {small}, so {n} * {factor} = {n * factor}.",
            f"There are {n * factor} {small} in {n} {big}.")
