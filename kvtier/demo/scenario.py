"""What the demo asks: a chat of 30 turns in 5 branches, a few-shot batch, and one prompt continued several times."""

from __future__ import annotations

from typing import Final, NamedTuple

SYSTEM: Final = (
    "<|im_start|>system\nYou help people who grow vegetables on a balcony. You know soil, light, water, seeds, pests "
    "and seasons. You answer briefly, in plain words, and you say so when you do not know.<|im_end|>\n"
)
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"

TRUNK: Final = (
    "I have a small balcony that faces south and three long wooden boxes. Where should I begin?",
    "Most days there is sun from ten to four. Is that enough for fruit, or should I grow leaves?",
    "I would like to eat something by June. Which seeds can go into the boxes this very week?",
    "The boxes have no holes at the bottom. Do I have to drill some, and how many of them?",
    "What do I fill them with? There is a bag of old potting soil from last summer in the cellar.",
    "How deep should the soil be, and how far apart do I put the seeds in each of the rows?",
    "My tap water leaves white marks on glass. Is it a problem for the plants if I use it?",
    "I am away every second weekend. How can the boxes stay moist for three days without me?",
    "Do I need to feed them, and if so, is there anything in my kitchen that would do the job?",
    "Good. Please remember all of this, I will now ask about several things one after another.",
)
BRANCHES: Final = {
    "tomatoes": (
        "First, tomatoes: would two plants of a small kind fit into one of my boxes?",
        "When do I put them outside, and what do I do if a cold night is announced?",
        "Should I pinch out the side shoots, and what happens if I leave them all?",
        "The lowest leaves have turned yellow. Is this a disease or simply hunger?",
    ),
    "herbs": (
        "First, herbs: which of them like full sun and forgive me when I forget to water?",
        "Can basil and rosemary share a box, or do they want quite different things?",
        "How do I cut basil so that it grows bushy and does not run into flower?",
        "May I dry what is left in autumn, and does mint keep any of its taste then?",
    ),
    "soil": (
        "First, the soil: can the old bag be used again if I mix something into it?",
        "How would I notice that it has become too sour for most of the vegetables?",
        "Is coffee from the kitchen good for it, and how much of it per box and month?",
        "There are small white dots in the bag. Are they alive, and do they harm roots?",
    ),
    "pests": (
        "First, pests: green lice sit under the leaves. What do I do without poison?",
        "Do ladybirds stay on a balcony on the fourth floor if I were to buy a few?",
        "Something has cut off the seedlings right above the soil. Who does such things?",
        "How do I keep the pigeons from taking a bath in the boxes every morning?",
    ),
    "winter": (
        "First, winter: which leaves can I sow in September to eat them in December?",
        "Do the wooden boxes survive frost when they are full of wet soil, or not?",
        "Is a sheet of fleece enough, or do I need glass over the boxes at night?",
        "What is to be done in January so that everything can begin early in spring?",
    ),
}

EXAMPLES: Final = (
    "Say for each note whether it is about water, light, soil or pests.\n"
    "Note: The leaves hang down at noon and stand up again at night. Answer: water\n"
    "Note: The stems are long, thin and pale, and lean to the window. Answer: light\n"
    "Note: After rain the box is a pond, and a crust covers it when dry. Answer: soil\n"
    "Note: There are fine webs between the leaves and tiny red dots on them. Answer: pests\n"
    "Note: The saucer under the pot has been full for a week and it smells. Answer: water\n"
    "Note: Since the tree next door was cut down the lettuce has burnt edges. Answer: light\n"
    "Note: Roots grow out of the bottom and the earth has sunk by a hand. Answer: soil\n"
    "Note: Round holes in the cabbage, and black crumbs below each of them. Answer: pests\n"
)
QUESTIONS: Final = (
    "The cress is yellow on the side that faces the wall.",
    "A silver trail leads from the wall to the lettuce.",
    "The pot weighs almost nothing when I lift it.",
    "The earth is grey, hard, and comes off the edge of the box.",
    "Small flies rise whenever I touch the basil.",
    "The tomatoes behind the curtain do not flower.",
)

STORY: Final = (
    "The old gardener had kept a diary of the balcony for forty years. On the first page she had written down the "
    "date, the weather, and a single rule that she never broke. When her grandson found the diary he sat down between "
    'the boxes, opened it and read aloud: "The most important thing about growing food in the air is'
)
SEEDS: Final = (11, 12, 13, 14)


class Request(NamedTuple):
    """One prompt: the tokens of request `parent` with its answer (-1: none), then `text`."""

    part: str
    label: str
    parent: int
    text: str
    new_tokens: int
    seed: int | None = None
    """Sampled with this seed; None: greedy."""


def requests() -> list[Request]:
    """All requests in the order in which they are made."""
    out: list[Request] = []
    for number, question in enumerate(TRUNK, 1):
        out.append(_turn("chat", f"turn {number}", len(out) - 1, question))
    for name, questions in BRANCHES.items():
        parent = len(TRUNK) - 1
        for number, question in enumerate(questions, len(TRUNK) + 1):
            out.append(_turn(f"branch {name}", f"turn {number}", parent, question))
            parent = len(out) - 1
    out += [
        Request("few-shot", f"question {n}", -1, f"{EXAMPLES}Note: {question} Answer:", 3)
        for n, question in enumerate(QUESTIONS, 1)
    ]
    out += [Request("fork", f"seed {seed}", -1, STORY, 6, seed) for seed in SEEDS]
    return out


def _turn(part: str, label: str, parent: int, question: str) -> Request:
    """A question of the chat, after the answer to the one before."""
    opening = SYSTEM if parent < 0 else END  # the answer was cut short: close it
    return Request(part, label, parent, f"{opening}{USER}{question}{END}{ASSISTANT}", 4)
