"""Prints the text that comes with the package: short tales from a small grammar of our own, always the same ones.

python examples/tales.py > flashspan/data/corpus/tales.txt
"""

import argparse
import random
import signal

R = random.Random(7)
who = [
    "the miller",
    "the ferryman",
    "a young weaver",
    "the old clockmaker",
    "the baker's daughter",
    "a tired soldier",
    "the lighthouse keeper",
    "a travelling piper",
    "the schoolmaster",
    "a blind fiddler",
    "the widow on the hill",
    "the mayor",
    "a salt merchant",
    "the gardener",
    "a quiet monk",
    "the fox",
    "the heron",
    "the grey cat",
    "a very small dragon",
    "the charcoal burner",
    "the postman",
    "a runaway princess",
    "the smith",
    "the beekeeper",
]
name = [
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
place = [
    "by the river",
    "under the elm",
    "at the crossroads",
    "in the empty church",
    "behind the mill",
    "on the long bridge",
    "in the market square",
    "at the edge of the marsh",
    "beneath the old tower",
    "on the frozen lake",
    "in the orchard",
    "at the harbour wall",
    "in a room above the inn",
    "where the two roads meet",
    "in the shadow of the hill",
]
time_ = [
    "One morning in March",
    "On the longest night of the year",
    "When the rain had stopped",
    "Before the bells rang",
    "At the end of the harvest",
    "In the year of the great flood",
    "Long after midnight",
    "On a Tuesday, of all days",
    "When the swallows came back",
    "In the week of the fair",
    "As the snow began to fall",
    "The day after the wedding",
]
thing = [
    "a silver button",
    "three loaves of bread",
    "a letter without a name",
    "the key to the granary",
    "a lantern with no oil",
    "half a map",
    "a pair of red boots",
    "a jar of honey",
    "a bell that would not ring",
    "an egg the size of a fist",
    "a coat of many patches",
    "a book with one page",
    "the mayor's hat",
    "a rope of seven knots",
    "a broken compass",
    "a single white feather",
    "a purse full of pebbles",
    "a wooden horse",
]
found = [
    "found",
    "lost",
    "carried",
    "hid",
    "sold",
    "bought back",
    "dreamed of",
    "was given",
    "stole",
    "buried",
    "weighed",
    "mended",
    "dropped",
    "polished",
    "counted",
]
adj = [
    "patient",
    "foolish",
    "honest",
    "stubborn",
    "clever",
    "lonely",
    "hungry",
    "cheerful",
    "careful",
    "proud",
    "weary",
    "brave",
    "curious",
    "silent",
]
weather = [
    "The wind turned to the north",
    "A thin fog lay on the fields",
    "The sun was low and red",
    "It smelled of smoke and apples",
    "The river was higher than anyone remembered",
    "There was frost on the wheel",
    "The stars came out one by one",
    "Somewhere a dog was barking",
    "The road was white with dust",
]
say = ["said", "asked", "whispered", "answered", "cried", "muttered", "replied", "called"]
q = [
    "Who has taken {t}?",
    "Will you sell me {t}?",
    "Do you know the way to the sea?",
    "What do you carry under your coat?",
    "Is it true what they say of {n}?",
    "How many winters have you seen?",
    "Why do you sit here {p}?",
    "Have you seen {w} today?",
    "What is {t} worth to you?",
    "Must we cross before dark?",
]
a = [
    "I have {t}, and I will not part with it.",
    "Ask {n}; I only mend what others break.",
    "Nobody knows, and nobody asks twice.",
    "It is worth as much as a night's sleep.",
    "Take it, but remember who gave it to you.",
    "I saw {w} {p}, and that is all I will say.",
    "You may count them yourself.",
    "Not before the river is low again.",
    "What is lost {p} is found {p}.",
    "I am too {j} to tell you a lie.",
    "Give me {t}, and I will show you.",
    "The one who is {j} does not need {t}.",
]
end = [
    "So it was settled, and nobody spoke of it again.",
    "And if they have not quarrelled, they are sitting there still.",
    "From that day on the mill turned twice as fast.",
    "{N} laughed, and the matter was closed.",
    "The bell rang once, although no one had touched the rope.",
    "They shared the bread, and the night was not so cold.",
    "In the morning {t} was gone, and so was {w}.",
    "That is why the bridge has seven arches and not eight.",
    "The children still tell it, but they tell it wrong.",
    "And {N}, who was {j}, became {k}.",
]
moral = [
    "He who counts pebbles will sleep on stones.",
    "A borrowed lantern lights the wrong road.",
    "Better half a map and a good friend.",
    "What the river takes it does not keep.",
    "The slowest wheel grinds the finest flour.",
    "A closed door is also an answer.",
    "Even a small dragon must be fed.",
    "Ask the way before you are lost.",
]
c = R.choice


def fill(s, n):
    return s.format(t=c(thing), n=c(name), w=c(who), p=c(place), j=c(adj), k=c(adj), N=n)


def cap(s):
    return s[0].upper() + s[1:]


def talk(x, y):
    lines = []
    for i in range(R.randint(2, 6)):
        speaker = (x, y)[i % 2]
        lines.append(f"{speaker.upper()}:\n{fill(c(q if R.random() < 0.45 else a), x)}")
        if R.random() < 0.25:
            lines[-1] += " " + fill(c(a), y)
    return "\n\n".join(lines)


def tale():
    n, m = R.sample(name, 2)
    w, v = R.sample(who, 2)
    first = f"{c(time_)} {w} named {n} {c(found)} {c(thing)} {c(place)}. {c(weather)}."
    if R.random() < 0.6:
        first += f" {n} was {c(adj)} and {c(adj)}, but not {c(adj)}."
    came = c(["came", "stood", "was waiting", "passed"])
    met = f"{cap(v)} {came} {c(place)}."
    asked = f'"{fill(c(q), n)}" {c(say)} {m}.'
    second = f'{met} {asked} "{fill(c(a), n)}" {c(say)} {n}.'
    third = f"They walked {c(place)} and {c(found)} {c(thing)}, and {m} {c(found)} {c(thing)}. {c(weather)}."
    parts = [first, second] + ([third] if R.random() < 0.7 else [])
    if R.random() < 0.75:
        parts.append(talk(n, m))
    parts.append(fill(c(end), n) + (" " + c(moral) if R.random() < 0.5 else ""))
    return "\n\n".join(parts)


def book():
    out, size = [], 0
    while size < 240_000:
        t = tale()
        out.append(t)
        size += len(t) + 5
    return "\n\n* * *\n\n".join(out)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` has read enough: end, as any command does
    print(book())
