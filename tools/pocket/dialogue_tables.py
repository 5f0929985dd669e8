"""Tables of facts, words and names for the synthetic dialogues (written for this project, plain common knowledge).

Data only. Two-column tables are dicts; word lists are lists. Everything is lower case unless it is a name.
"""


def _pairs(text):
    """'a:b, c:d' -> {'a': 'b', 'c': 'd'} (entries may span lines)."""
    return dict(tuple(part.strip() for part in item.split(":")) for item in text.replace("\n", " ").split(",") if item.strip())


def _words(text):
    return text.split()


CAPITALS = _pairs("""France:Paris, Italy:Rome, Spain:Madrid, Germany:Berlin, Portugal:Lisbon, Greece:Athens, Norway:Oslo,
Sweden:Stockholm, Finland:Helsinki, Denmark:Copenhagen, Poland:Warsaw, Austria:Vienna, Hungary:Budapest, Ireland:Dublin,
Belgium:Brussels, Iceland:Reykjavik, Russia:Moscow, Ukraine:Kyiv, Turkey:Ankara, Egypt:Cairo, Kenya:Nairobi,
Nigeria:Abuja, Ghana:Accra, Morocco:Rabat, Ethiopia:Addis Ababa, Japan:Tokyo, China:Beijing, South Korea:Seoul,
India:New Delhi, Thailand:Bangkok, Vietnam:Hanoi, Indonesia:Jakarta, Nepal:Kathmandu, Pakistan:Islamabad, Iran:Tehran,
Iraq:Baghdad, Israel:Jerusalem, Saudi Arabia:Riyadh, Canada:Ottawa, the United States:Washington, Mexico:Mexico City,
Cuba:Havana, Brazil:Brasilia, Argentina:Buenos Aires, Chile:Santiago, Peru:Lima, Colombia:Bogota, Uruguay:Montevideo,
Ecuador:Quito, Venezuela:Caracas, Australia:Canberra, New Zealand:Wellington, the Netherlands:Amsterdam,
Switzerland:Bern, Romania:Bucharest, Bulgaria:Sofia, Serbia:Belgrade, Croatia:Zagreb, Slovenia:Ljubljana,
the United Kingdom:London, Scotland:Edinburgh, Wales:Cardiff, Estonia:Tallinn, Latvia:Riga, Lithuania:Vilnius,
Slovakia:Bratislava, Algeria:Algiers, Tunisia:Tunis, Senegal:Dakar, Uganda:Kampala, Mongolia:Ulaanbaatar,
the Philippines:Manila, Malaysia:Kuala Lumpur, Jordan:Amman, Lebanon:Beirut, Syria:Damascus, Qatar:Doha""")

CONTINENTS = _pairs("""France:Europe, Italy:Europe, Spain:Europe, Germany:Europe, Greece:Europe, Norway:Europe, Poland:Europe,
Egypt:Africa, Kenya:Africa, Nigeria:Africa, Ghana:Africa, Morocco:Africa, Ethiopia:Africa, Japan:Asia, China:Asia,
India:Asia, Thailand:Asia, Vietnam:Asia, Nepal:Asia, Iran:Asia, Iraq:Asia, Canada:North America, Mexico:North America,
Cuba:North America, Brazil:South America, Argentina:South America, Chile:South America, Peru:South America,
Colombia:South America, Ecuador:South America, Ireland:Europe, Sweden:Europe, Portugal:Europe, Mongolia:Asia""")

LANGUAGES = _pairs("""France:French, Italy:Italian, Spain:Spanish, Germany:German, Portugal:Portuguese, Greece:Greek,
Norway:Norwegian, Sweden:Swedish, Finland:Finnish, Denmark:Danish, Poland:Polish, Hungary:Hungarian, Russia:Russian,
Turkey:Turkish, Japan:Japanese, China:Chinese, South Korea:Korean, Thailand:Thai, Vietnam:Vietnamese, Iran:Persian,
Egypt:Arabic, Brazil:Portuguese, Mexico:Spanish, Argentina:Spanish, Iceland:Icelandic, Austria:German""")

OPPOSITES = _pairs("""hot:cold, big:small, fast:slow, up:down, left:right, day:night, black:white, good:bad, old:young,
happy:sad, high:low, long:short, hard:soft, wet:dry, open:closed, full:empty, light:dark, early:late, rich:poor,
strong:weak, clean:dirty, loud:quiet, true:false, first:last, inside:outside, near:far, thick:thin, wide:narrow,
deep:shallow, heavy:light, sweet:sour, rough:smooth, push:pull, buy:sell, give:take, win:lose, laugh:cry, love:hate,
begin:end, remember:forget, summer:winter, north:south, east:west, friend:enemy, front:back, top:bottom, always:never,
more:less, easy:difficult, cheap:expensive, safe:dangerous, awake:asleep, alive:dead, brave:afraid, sharp:blunt,
tall:short, warm:cool, question:answer, peace:war, yes:no""")

ANIMAL_YOUNG = _pairs("""dog:puppy, cat:kitten, cow:calf, horse:foal, sheep:lamb, goat:kid, pig:piglet, hen:chick, duck:duckling,
goose:gosling, bear:cub, lion:cub, frog:tadpole, deer:fawn, swan:cygnet, owl:owlet, kangaroo:joey, seal:pup""")

ANIMAL_SOUND = _pairs("""dog:bark, cat:meow, cow:moo, horse:neigh, sheep:bleat, pig:oink, duck:quack, lion:roar, owl:hoot,
frog:croak, snake:hiss, bee:buzz, wolf:howl, mouse:squeak, crow:caw, hen:cluck, donkey:bray, bird:chirp""")

LEGS = {"dog": 4, "cat": 4, "cow": 4, "horse": 4, "spider": 8, "ant": 6, "bee": 6, "fly": 6, "hen": 2, "duck": 2,
        "bird": 2, "snake": 0, "fish": 0, "goat": 4, "beetle": 6, "owl": 2, "frog": 4, "lion": 4, "worm": 0, "crab": 10}

COLOURS = _pairs("""the sky:blue, grass:green, snow:white, coal:black, blood:red, a lemon:yellow, a carrot:orange, milk:white,
a banana:yellow, a strawberry:red, the sun:yellow, a frog:green, a raven:black, an orange:orange, a violet:purple,
chocolate:brown, the sea:blue, a leaf:green, a cherry:red, an elephant:grey, a plum:purple, salt:white, tea:brown""")

PLURALS = _pairs("""cat:cats, dog:dogs, box:boxes, bus:buses, baby:babies, city:cities, leaf:leaves, knife:knives, man:men,
woman:women, child:children, foot:feet, tooth:teeth, mouse:mice, goose:geese, sheep:sheep, fish:fish, wolf:wolves,
church:churches, berry:berries, hero:heroes, tomato:tomatoes, life:lives, day:days, key:keys, house:houses, ox:oxen""")

PAST = _pairs("""go:went, see:saw, eat:ate, drink:drank, run:ran, write:wrote, read:read, speak:spoke, take:took, give:gave,
make:made, come:came, know:knew, think:thought, buy:bought, bring:brought, teach:taught, catch:caught, find:found,
sleep:slept, keep:kept, leave:left, feel:felt, sing:sang, swim:swam, fly:flew, draw:drew, grow:grew, throw:threw,
walk:walked, play:played, open:opened, help:helped, look:looked, work:worked, stop:stopped, try:tried, carry:carried""")

FRENCH = _pairs("""water:eau, bread:pain, house:maison, dog:chien, cat:chat, book:livre, sun:soleil, moon:lune, friend:ami, day:jour,
night:nuit, tree:arbre, milk:lait, apple:pomme, red:rouge, green:vert, white:blanc, black:noir, one:un, two:deux,
three:trois, four:quatre, five:cinq, hello:bonjour, thank you:merci, good:bon, city:ville, school:école, horse:cheval""")
SPANISH = _pairs("""water:agua, bread:pan, house:casa, dog:perro, cat:gato, book:libro, sun:sol, moon:luna, friend:amigo, day:día,
night:noche, tree:árbol, milk:leche, apple:manzana, red:rojo, green:verde, white:blanco, black:negro, one:uno, two:dos,
three:tres, four:cuatro, five:cinco, hello:hola, thank you:gracias, good:bueno, city:ciudad, school:escuela, horse:caballo""")
GERMAN = _pairs("""water:Wasser, bread:Brot, house:Haus, dog:Hund, cat:Katze, book:Buch, sun:Sonne, moon:Mond, friend:Freund, day:Tag,
night:Nacht, tree:Baum, milk:Milch, apple:Apfel, red:rot, green:grün, white:weiß, black:schwarz, one:eins, two:zwei,
three:drei, four:vier, five:fünf, hello:hallo, thank you:danke, good:gut, city:Stadt, school:Schule, horse:Pferd""")
TRANSLATIONS = {"French": FRENCH, "Spanish": SPANISH, "German": GERMAN}

SYMBOLS = _pairs("""hydrogen:H, helium:He, carbon:C, nitrogen:N, oxygen:O, sodium:Na, iron:Fe, copper:Cu, silver:Ag, gold:Au, lead:Pb,
tin:Sn, zinc:Zn, calcium:Ca, potassium:K, sulfur:S, chlorine:Cl, neon:Ne, mercury:Hg, aluminium:Al""")

DEFINITIONS = {
    "cat": "a small animal that people often keep as a pet", "dog": "an animal that is often kept as a pet or to guard a house",
    "book": "a set of printed pages that you can read", "river": "a long stream of water that flows to the sea",
    "mountain": "a very high hill", "island": "a piece of land with water all around it",
    "teacher": "a person who helps others to learn", "doctor": "a person who helps sick people to get well",
    "baker": "a person who makes bread and cakes", "farmer": "a person who grows food or keeps animals",
    "hammer": "a tool for hitting nails", "knife": "a tool for cutting things", "lamp": "a thing that gives light",
    "clock": "a machine that shows the time", "bridge": "a road that goes over a river",
    "library": "a place where many books are kept", "school": "a place where children learn",
    "kitchen": "a room where food is cooked", "garden": "a piece of land where plants grow",
    "forest": "a large area with many trees", "desert": "a dry place with very little water",
    "winter": "the coldest season of the year", "summer": "the warmest season of the year",
    "triangle": "a shape with three sides", "square": "a shape with four equal sides",
    "planet": "a large round body that moves around a star", "star": "a very large ball of hot gas in space",
    "bicycle": "a vehicle with two wheels that you ride", "ship": "a large boat that sails on the sea",
    "chair": "a piece of furniture that you sit on", "table": "a piece of furniture with a flat top",
    "pencil": "a thing that you write or draw with", "window": "an opening in a wall that lets in light",
    "door": "a thing that you open to go into a room", "violin": "a musical instrument with four strings",
    "piano": "a musical instrument with black and white keys", "storm": "very bad weather with strong wind and rain",
    "rainbow": "an arc of colours in the sky after rain", "king": "a man who rules a country",
    "queen": "a woman who rules a country", "compiler": "a program that turns source code into machine code",
    "computer": "a machine that stores and works with data", "program": "a list of instructions for a computer",
    "prime number": "a number that can be divided only by one and by itself", "dictionary": "a book that explains words",
}

DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
PLANETS = _words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune")
NUMBER_WORDS = _words("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
                      "seventeen eighteen nineteen twenty")
ALPHABET = "abcdefghijklmnopqrstuvwxyz"

NAMES = _words("""Anna Ben Clara David Emma Felix Grace Henry Iris Jack Karen Leo Maria Nina Oscar Paul Quinn Rosa Sam Tom Uma
Victor Wendy Yara Zoe Alice Bob Carol Dan Eva Frank Gina Hugo Ivan Julia Kate Liam Mona Noah Olga Peter Ruth Simon Tara
Vera Walter Adam Bella Carl Diana Eric Fiona George Hanna Ian Jane Kevin Laura Mark Nora Omar Priya Ravi Sara Tim""")
CITIES = _words("""Paris Rome Oslo Berlin Madrid Vienna London Dublin Lisbon Athens Prague Warsaw Tokyo Cairo Lima Boston Chicago
Sydney Toronto Geneva Milan Naples Lyon Seville Hamburg Munich Venice Florence Porto Bergen Kyoto Osaka Delhi Mumbai""")
OBJECTS = _words("""box book lamp chair table cup key bag hat coat ring clock map pen coin ball bell rope stone shell basket
bottle candle mirror spoon plate knife drum kite boat cart ladder bucket brush blanket umbrella suitcase drawer""")
ADJECTIVES = _words("red blue green yellow black white brown grey orange purple small large old new round heavy wooden golden "
                    "silver broken empty clean tiny bright")
ANIMALS = _words("dog cat cow horse sheep goat pig hen duck goose bear lion frog deer owl seal wolf mouse fox rabbit bird "
                 "donkey snake tiger monkey elephant")
FRUITS = _words("apple pear plum cherry lemon orange banana grape peach melon fig mango berry lime kiwi")
FOODS = _words("bread cheese soup rice pasta fish salad cake pizza eggs honey beans tea coffee milk juice")
PROFESSIONS = _words("teacher doctor baker farmer painter writer sailor driver cook nurse singer lawyer pilot gardener "
                     "carpenter engineer librarian dentist tailor judge")
HOBBIES = ["chess", "music", "painting", "reading", "swimming", "cooking", "running", "dancing", "fishing", "singing",
           "football", "tennis", "hiking", "gardening", "cycling", "drawing"]
PLACES = ["the garden", "the kitchen", "the attic", "the cellar", "the library", "the garage", "the hall", "the bedroom",
          "the office", "the barn", "the shed", "the tower", "the market", "the station", "the school", "the bath"]
WORDS = _words("""river stone tree cloud wind fire rain snow bread house light night music paper silver winter summer morning
garden window bridge forest ocean island valley mountain teacher doctor kitchen village table flower feather thunder
candle marble pepper ribbon saddle timber velvet wagon yellow zebra anchor butter carpet dragon engine finger guitar
hammer jacket kettle ladder magnet needle orchard pocket quarry rocket spider tunnel violin whistle""")
ADVERBS = _words("slowly quickly quietly happily sadly bravely calmly gladly")
STORY_GOALS = ["find some honey", "see the sea", "cross the river", "find a friend", "climb the hill", "learn to sing",
               "find a warm home", "pick some apples", "look at the stars", "find a lost key", "visit the king",
               "build a small boat", "bake a cake", "catch the moon"]
STORY_ENDS = ["went home and slept well", "laughed and danced all night", "shared a big meal", "promised to meet again",
              "lived happily from that day on", "told everyone about it", "sat by the fire and sang"]
