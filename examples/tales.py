"""Prints the text file of the package: short tales from a small grammar, the same in each run.

python examples/tales.py > flashspan/data/corpus/tales.txt
"""

import argparse
import random
import signal

SEED, NUM_TALES = 7, 1000
BREAK = "\n\n* * *\n\n"

NAMES = [
    "Anselm",
    "Beatrix",
    "Corvin",
    "Dorothea",
    "Emmerich",
    "Fenna",
    "Gideon",
    "Hedwig",
    "Ivo",
    "Jorinde",
    "Kasimir",
    "Lotte",
    "Matthias",
    "Nele",
    "Oswin",
    "Petronella",
    "Quirin",
    "Rosalind",
    "Silvan",
    "Tilda",
    "Ulrich",
    "Veit",
    "Wanda",
    "Yorick",
]
ROLES = [
    "a miller",
    "a ferryman",
    "a young weaver",
    "an old clockmaker",
    "a baker",
    "a tired soldier",
    "a lighthouse keeper",
    "a travelling piper",
    "a schoolmaster",
    "a blind fiddler",
    "a salt merchant",
    "a gardener",
    "a quiet monk",
    "a charcoal burner",
    "a postman",
    "a runaway princess",
    "a smith",
    "a beekeeper",
    "a shepherd",
    "a bell ringer",
]
ANIMALS = ["fox", "heron", "grey cat", "very small dragon", "brown bear", "hedgehog", "goose", "white mouse"]
THINGS = [
    "silver button",
    "loaf of bread",
    "letter without a name",
    "key to the granary",
    "lantern with no oil",
    "torn map",
    "pair of red boots",
    "jar of honey",
    "bell that would not ring",
    "coat of many patches",
    "book with one page",
    "rope of seven knots",
    "broken compass",
    "white feather",
    "purse full of pebbles",
    "wooden horse",
    "copper kettle",
    "green hat",
]
PLACES = [
    "by the river",
    "under the elm",
    "at the crossroads",
    "in the empty church",
    "behind the mill",
    "on the long bridge",
    "in the market square",
    "at the edge of the marsh",
    "beneath the old tower",
    "beside the frozen lake",
    "in the orchard",
    "at the harbour wall",
    "in a room above the inn",
    "in the shadow of the hill",
]
GOALS = ["the sea", "the next town", "the castle", "the far side of the hill", "the house of the king", "the old mill"]
TIMES = [
    "One morning in March",
    "On the longest night of the year",
    "When the rain had stopped",
    "Before the bells rang",
    "At the end of the harvest",
    "In the year of the great flood",
    "Long after midnight",
    "One evening in winter",
    "When the swallows came back",
    "In the week of the fair",
    "As the snow began to fall",
    "The day after the wedding",
]
WEATHER = [
    "The wind turned to the north",
    "A thin fog lay on the fields",
    "The sun was low and red",
    "The air smelled of smoke and apples",
    "The river was higher than anyone remembered",
    "There was frost on the wheel",
    "The stars came out one by one",
    "Somewhere a dog was barking",
    "The road was white with dust",
    "The snow lay deep on the roofs",
]
KIND = ["patient", "honest", "cheerful", "generous", "gentle", "friendly"]
HARD = ["stubborn", "proud", "greedy", "careful", "suspicious", "silent"]
GREETINGS = [
    '"Good day," said {o}. "What do you carry under your coat?"',
    '"Where are you going, and what is that in your hand?" asked {o}.',
    '"You look tired," said {o}. "What do you have there?"',
    '"I have waited {p2} since the morning," said {o}. "Do you bring something?"',
    '"Stop," said {o}. "Nobody passes here who does not show me what they carry."',
]
ANSWERS = [
    '"It is only {a_t}," answered {h}. "I found it {p1}."',
    '"I have {a_t}," said {h}, "and I do not know what it is worth."',
    '"{A_t}," said {h}. "It was lying {p1}, and nobody wanted it."',
    '"I carry {a_t}," said {h}. "I found it {p1} and I am looking for its owner."',
]
OFFERS = [
    '"Give me the {t}, and I will show you the way to {g}," said {o}.',
    '"I will give you {a_u} for the {t}," said {o}.',
    '"My mother lost a {t} many years ago," whispered {o}. "May I have it?"',
    '"The {t} belongs to me," cried {o}. "I lost it {p1} last year."',
]
AGREED = [
    '"Take it," said {h}, "but remember who gave it to you."',
    '"Then it is yours," answered {h}. "I was only keeping it for you."',
    '"A friend is worth more than a {t}," said {h} and laughed.',
]
REFUSED = [
    '"No," said {h}. "I found it, and I will keep it."',
    '"I will not part with it," answered {h}. "Not for {a_u}, and not for the whole world."',
    '"Ask me again tomorrow," said {h}, and closed the door.',
]
ANIMAL = [
    'Then {an_a} came along. "I have seen the {t} before," said the {a}. "It brings luck to all who share it."',
    'On the way they met {an_a}. "Be careful with the {t}," said the {a}. "The last one who had it never came home."',
    '{An_a} was sitting {p2} and listened. "You are both wrong," said the {a}. "The {t} belongs to the king."',
]
JOURNEY = [
    "So they walked to {g} together, and {h} sang a song on the way.",
    "They walked all night, and in the morning they came to {g}.",
    "The way to {g} was long, and they shared the bread that {o} had brought.",
]
ALONE = [
    "So {h} walked to {g} alone, and nobody sang on the way.",
    "{h} walked all night, and in the morning there was nothing but snow.",
    "The way to {g} was long, and {h} had nobody to talk to.",
]
GOOD_ENDS = [
    "From that day on {h} and {o} were friends, and nobody spoke of the {t} again.",
    "{o} kept the {t} for many years, and {h} came to look at it every winter.",
    "The bell rang once, although nobody had touched the rope, and everyone was happy.",
    "And if they have not quarrelled, they are sitting {p2} still.",
]
BAD_ENDS = [
    "In the morning the {t} was gone, and so was {o}.",
    "{h} hid the {t} {p2} and never found it again.",
    "{h} kept the {t}, but it was never worth anything.",
    "The children still tell how {h} sat alone {p2} and counted the stars.",
]
GOOD_MORALS = [
    "Better half a map and a good friend.",
    "Even a small dragon must be fed.",
    "What you give away stays with you.",
    "The slowest wheel grinds the finest flour.",
]
BAD_MORALS = [
    "Those who count pebbles will sleep on stones.",
    "What the river takes it does not keep.",
    "A closed door is also an answer.",
    "A borrowed lantern lights the wrong road.",
]


def with_article(noun: str) -> str:
    """A noun with a or an before it."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def make_tale(chance: random.Random) -> str:
    """One tale: the hero finds a thing, meets another who asks for it, and gives it away or keeps it."""
    pick = chance.choice
    hero, other = chance.sample(NAMES, 2)
    thing, price = chance.sample(THINGS, 2)
    role, other_role = chance.sample(ROLES, 2)
    first, second = chance.sample(PLACES, 2)
    animal, kind = pick(ANIMALS), chance.random() < 0.5
    words = {"h": hero, "o": other, "t": thing, "p1": first, "p2": second, "g": pick(GOALS), "a": animal}
    words |= {"a_t": with_article(thing), "a_u": with_article(price), "an_a": with_article(animal)}
    words |= {"A_t": words["a_t"].capitalize(), "An_a": words["an_a"].capitalize()}

    one, two = chance.sample(KIND if kind else HARD, 2)
    opening = [
        f"{pick(TIMES)}, {role} named {hero} found {words['a_t']} {first}. {pick(WEATHER)}.",
        f"{hero} was {one} and {two}, but never {pick(HARD if kind else KIND)}.",
    ]
    where = pick([f"was sitting {second}", f"stood {second}", f"came and sat down {second}", f"was waiting {second}"])
    meeting = [f"{other_role.capitalize()} named {other} {where}."]
    talk = [[pick(lines)] for lines in (GREETINGS, ANSWERS, OFFERS, AGREED if kind else REFUSED)]
    walk = [pick(WEATHER) + "."] if chance.random() < 0.5 else []
    walk.append(pick(JOURNEY if kind else ALONE))
    ending = [pick(GOOD_ENDS if kind else BAD_ENDS)]
    if chance.random() < 0.5:
        ending.append(pick(GOOD_MORALS if kind else BAD_MORALS))
    guest = [[pick(ANIMAL)]] if chance.random() < 0.4 else []
    parts = [opening, meeting, *talk, *guest, walk, ending]
    return "\n\n".join(" ".join(part) for part in parts).format(**words)


def make_book() -> str:
    """The text of all tales."""
    chance = random.Random(SEED)
    return BREAK.join(make_tale(chance) for _ in range(NUM_TALES))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when `| head` closes the pipe
    print(make_book())
