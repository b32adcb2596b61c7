"""Words of :mod:`atom.benchmarks.word_problems`: themes, sentences, lines of a solution.

A sentence's fields: ``who`` and ``Who`` (the subject, at the start of a sentence the second),
``friend``, ``a`` and ``b`` (numbers), ``unit`` (what is counted), ``box`` and ``boxes`` (what holds
it), ``part`` (a half, a third, 20%). Solutions have ``step`` besides, such as ``3*4=12``.
"""

from __future__ import annotations

from dataclasses import dataclass

_PEOPLE = (
    "Ada Aiko Alma Amir Anna Arun Beth Boris Carla Chen Clara Dana David Diego Elena Eli Emma Enzo "
    "Erik Eva Farid Fatima Felix Fiona George Grace Hana Hassan Helen Hugo Ida Igor Ines Ivan Jack "
    "Jana Jonas Julia Kai Karim Kate Kofi Lara Leo Lena Liam Lina Lucas Maria Mark Maya Mei Mia "
    "Milo Nadia Nina Noah Nora Olga Oliver Omar Oscar Paul Petra Priya Rania Ravi Rosa Ruth Sam "
    "Sara Sofia Sven Tara Theo Tom Uma Vera Victor Wanda Yara Yusuf Zoe"
)
#: people; a problem takes one for its subject and others for friends
NAMES: tuple[str, ...] = tuple(_PEOPLE.split())

#: what is counted, and what holds several of it (plural)
GOODS: tuple[tuple[str, str], ...] = (
    ("apples", "baskets"),
    ("pears", "crates"),
    ("lemons", "bags"),
    ("oranges", "boxes"),
    ("eggs", "cartons"),
    ("cookies", "jars"),
    ("muffins", "trays"),
    ("candies", "bags"),
    ("pencils", "boxes"),
    ("pens", "packs"),
    ("notebooks", "bundles"),
    ("stickers", "sheets"),
    ("stamps", "albums"),
    ("cards", "packs"),
    ("marbles", "jars"),
    ("beads", "tubes"),
    ("buttons", "tins"),
    ("shells", "buckets"),
    ("roses", "bunches"),
    ("tulips", "vases"),
    ("books", "shelves"),
    ("chairs", "rows"),
    ("bottles", "crates"),
    ("candles", "cartons"),
    ("balloons", "packs"),
    ("bricks", "stacks"),
    ("tiles", "boxes"),
    ("toys", "chests"),
    ("tickets", "rolls"),
    ("photos", "folders"),
    ("seeds", "packets"),
    ("plants", "rows"),
)

_THINGS = (
    "a book|a bag|a ball|a game|a lamp|a hat|lunch|dinner|shoes|a shirt|a coat|a ticket|a gift|"
    "tools|paint|a bike lock|a concert|a train ride|groceries|a haircut"
)
#: what money is spent on
THINGS: tuple[str, ...] = tuple(_THINGS.split("|"))

#: sentences with numbers that no question asks for
DISTRACTORS: tuple[str, ...] = (
    "{friend} is {a} years old.",
    "{Who} lives at number {a} on Hill Street.",
    "The shop is {a} kilometers away.",
    "It was {a} degrees outside.",
    "{friend} has {a} cousins.",
    "The bus ride took {a} minutes.",
    "{friend} has lived in the town for {a} years.",
    "There were {a} clouds in the sky.",
    "The room has {a} windows.",
    "{Who} woke up {a} minutes late that day.",
    "The radio played {a} songs meanwhile.",
    "{friend} wrote {a} letters that week.",
    "The street has {a} trees.",
    "{friend} owns {a} umbrellas.",
)


@dataclass(frozen=True, slots=True)
class Theme:
    """Sentences about one kind of quantity, by what they do to it.

    Attributes:
        unit: what is counted; empty for goods, which have many.
        product: the quantity begins as ``a * b``.
        total: it begins as ``a + b``.
        gain, loss: ``a`` more, ``a`` less.
        product_gain, product_loss: ``a * b`` more or less.
        times: it becomes ``a`` times as much.
        fraction_loss: ``part`` of it goes.
        share: it is split equally among ``a``; one share is left.
        compare_more, compare_less: a friend has ``a`` more or less; then it is both together.
        question: asks for it.
    """

    unit: str
    product: tuple[str, ...]
    total: tuple[str, ...]
    gain: tuple[str, ...]
    loss: tuple[str, ...]
    product_gain: tuple[str, ...]
    product_loss: tuple[str, ...]
    times: tuple[str, ...]
    fraction_loss: tuple[str, ...]
    share: tuple[str, ...]
    compare_more: tuple[str, ...]
    compare_less: tuple[str, ...]
    question: tuple[str, ...]


GOODS_THEME = Theme(
    unit="",
    product=(
        "{Who} bought {a} {boxes} of {unit} with {b} {unit} each.",
        "{Who} filled {a} {boxes} with {b} {unit} each.",
        "{Who} got {b} {unit} from each of {a} friends.",
        "There were {a} {boxes} in the hall, and {who} put {b} {unit} into each.",
        "{Who} collected {b} {unit} a day for {a} days.",
    ),
    total=(
        "{Who} had {a} red {unit} and {b} blue {unit}.",
        "{Who} found {a} {unit} on Monday and {b} {unit} on Tuesday.",
        "{Who} had {a} {unit} at home and {b} at school.",
        "{Who} had {a} old {unit} and bought {b} new ones.",
    ),
    gain=(
        "Then {who} got {a} more {unit} from {friend}.",
        "After that {who} bought another {a} {unit}.",
        "{friend} gave {who} {a} {unit}.",
        "Later {who} found {a} more {unit}.",
    ),
    loss=(
        "Then {who} gave {a} {unit} to {friend}.",
        "After that {who} lost {a} {unit}.",
        "{friend} took {a} of the {unit}.",
        "{a} of the {unit} were damaged and thrown away.",
        "Later {who} sold {a} {unit}.",
    ),
    product_gain=(
        "{friend} brought {a} {boxes} with {b} {unit} each.",
        "Then {who} got {b} more {unit} a day for {a} days.",
        "After that {who} bought {a} more {boxes} of {b} {unit}.",
    ),
    product_loss=(
        "Then {who} gave {b} {unit} to each of {a} friends.",
        "After that {who} used {b} {unit} a day for {a} days.",
        "{friend} took away {a} {boxes} with {b} {unit} each.",
    ),
    times=(
        "A month later {who} had {a} times as many {unit}.",
        "Soon the number of {unit} had grown to {a} times as many.",
        "By spring there were {a} times as many {unit}.",
    ),
    fraction_loss=(
        "Then {who} gave {part} of the {unit} to {friend}.",
        "{Part} of the {unit} got lost.",
        "After that {who} sold {part} of the {unit}.",
    ),
    share=(
        "The {unit} were shared equally among {a} children, and {who} took one share.",
        "{Who} split the {unit} into {a} equal piles and kept one pile.",
        "Then {who} packed the {unit} evenly into {a} bags and kept only one bag.",
    ),
    compare_more=(
        "{friend} had {a} more {unit} than that, and they put all {unit} together.",
        "{friend} came with {a} {unit} more than {who} had, and they joined both collections.",
    ),
    compare_less=(
        "{friend} had {a} {unit} fewer than that, and they put all {unit} together.",
        "{friend} came with {a} {unit} fewer than {who} had, and they joined both collections.",
    ),
    question=(
        "How many {unit} were there in the end?",
        "How many {unit} were left?",
        "How many {unit} did {who} have at the end?",
        "What was the final number of {unit}?",
    ),
)

MONEY_THEME = Theme(
    unit="dollars",
    product=(
        "{Who} saved ${b} a week for {a} weeks.",
        "{Who} worked {a} hours for ${b} an hour.",
        "{Who} washed {a} cars and got ${b} for each.",
        "{Who} mowed {a} lawns at ${b} a lawn.",
    ),
    total=(
        "{Who} had ${a} in a purse and ${b} in a jar.",
        "{Who} earned ${a} in May and ${b} in June.",
        "{Who} got ${a} from an aunt and ${b} from an uncle.",
    ),
    gain=(
        "Then {who} earned ${a} more.",
        "{friend} paid back ${a} to {who}.",
        "After that {who} got ${a} as a present.",
    ),
    loss=(
        "Then {who} spent ${a} on {thing}.",
        "After that {who} lent ${a} to {friend}.",
        "{Who} paid ${a} for {thing}.",
    ),
    product_gain=(
        "Then {who} worked {a} more hours for ${b} an hour.",
        "After that {who} sold {a} drawings for ${b} each.",
        "{Who} also walked a dog {a} times for ${b} each time.",
    ),
    product_loss=(
        "Then {who} bought {a} tickets for ${b} each.",
        "After that {who} spent ${b} a day for {a} days.",
        "{Who} paid {a} helpers ${b} each.",
    ),
    times=(
        "A year later {who} had {a} times as much money.",
        "With luck the money grew to {a} times as much.",
    ),
    fraction_loss=(
        "Then {who} spent {part} of the money on {thing}.",
        "{Part} of the money went to {friend}.",
        "After that {who} gave {part} of the money away.",
    ),
    share=(
        "The money was split equally among {a} people, and {who} took one share.",
        "{Who} divided the money evenly over {a} envelopes and kept one envelope.",
    ),
    compare_more=(
        "{friend} had ${a} more than that, and they put their money together.",
        "{friend} came with ${a} more than {who} had, and they pooled all of it.",
    ),
    compare_less=(
        "{friend} had ${a} less than that, and they put their money together.",
        "{friend} came with ${a} less than {who} had, and they pooled all of it.",
    ),
    question=(
        "How many dollars were there in the end?",
        "How much money in dollars was left?",
        "How many dollars did {who} have at the end?",
    ),
)


def _measure(unit: str, do: str, did: str, back: str, kind: str) -> Theme:
    """A theme of something measured: ``did`` adds to it, ``back`` takes from it."""
    return Theme(
        unit=unit,
        product=(
            f"{{Who}} {did} {{b}} {unit} a day for {{a}} days.",
            f"In each of {{a}} weeks {{who}} {did} {{b}} {unit}.",
            f"{{Who}} {did} {{a}} times, each time {{b}} {unit}.",
        ),
        total=(
            f"{{Who}} {did} {{a}} {unit} on Monday and {{b}} {unit} on Friday.",
            f"{{Who}} {did} {{a}} {unit} in the morning and {{b}} {unit} in the evening.",
        ),
        gain=(
            f"Then {{who}} {did} {{a}} {unit} more.",
            f"After that {{who}} {did} another {{a}} {unit}.",
            f"With {{friend}}, {{who}} {did} {{a}} more {unit}.",
        ),
        loss=(
            f"Then {{a}} {unit} {back}.",
            f"Later {{friend}} noticed that {{a}} {unit} {back}.",
        ),
        product_gain=(
            f"Then {{who}} {did} {{b}} {unit} more on each of {{a}} days.",
            f"For {{a}} more days {{who}} {did} {{b}} {unit} a day.",
        ),
        product_loss=(
            f"On each of {{a}} days {{b}} {unit} {back}.",
            f"Then {{a}} times {{b}} {unit} {back}.",
        ),
        times=(
            f"By the end of the year the {kind} had grown to {{a}} times as many {unit}.",
            f"Later the {kind} was {{a}} times as large.",
        ),
        fraction_loss=(
            f"Then {{part}} of the {unit} {back}.",
            f"It turned out that {{part}} of the {unit} {back}.",
        ),
        share=(
            f"The {kind} was split evenly over {{a}} groups, and {{who}} wrote down one group's.",
            f"{{Who}} divided the {kind} by {{a}} to find what one of {{a}} equal parts is.",
        ),
        compare_more=(f"{{friend}} {did} {{a}} {unit} more than that, and they added both up.",),
        compare_less=(f"{{friend}} {did} {{a}} {unit} fewer than that, and they added both up.",),
        question=(
            f"How many {unit} was the {kind} in the end?",
            f"What was the final {kind} in {unit}?",
            f"After all this, how many {unit} did {{who}} {do} by this count?",
        ),
    )


MEASURES: tuple[Theme, ...] = (
    _measure("kilometers", "cycle", "cycled", "did not count", "distance"),
    _measure("miles", "walk", "walked", "were struck off", "distance"),
    _measure("pages", "read", "read", "had to be taken off", "page count"),
    _measure("minutes", "practice", "practiced", "did not count", "practice time"),
    _measure("liters", "collect", "collected", "leaked out", "supply"),
    _measure("kilograms", "harvest", "harvested", "were spoiled", "harvest"),
    _measure("meters", "swim", "swam", "were taken off", "distance"),
    _measure("points", "score", "scored", "were taken back", "score"),
)

#: a price turns goods into money
PRICE: tuple[str, ...] = (
    "{Who} sold all {unit} for ${a} each.",
    "Each of the {unit} was then sold for ${a}, and {who} kept the money.",
    "At the market {who} got ${a} for each of the {unit} and sold all of them.",
)
#: the same, with the price told before it is needed
PRICE_FIRST: tuple[str, ...] = (
    "The market pays ${a} for each of the {unit}.",
    "{Unit} cost ${a} each at the market.",
)
PRICE_LATER: tuple[str, ...] = (
    "{Who} sold all {unit} at the market.",
    "In the end {who} took all {unit} to the market and sold them.",
)

#: lines of a solution, by what is computed
SOLUTIONS: dict[str, tuple[str, ...]] = {
    "product": (
        "At first there were {step} {unit}.",
        "{Who} started with {step} {unit}.",
        "The start was {step} {unit}.",
    ),
    "total": (
        "At first there were {step} {unit}.",
        "{Who} started with {step} {unit}.",
        "Together that was {step} {unit}.",
    ),
    "gain": (
        "With {a} more there were {step} {unit}.",
        "That made {step} {unit}.",
        "Then there were {step} {unit}.",
    ),
    "loss": (
        "Without those there were {step} {unit}.",
        "That left {step} {unit}.",
        "Then there were {step} {unit}.",
    ),
    "added": (
        "{Who} added {step} {unit}.",
        "The new ones were {step} {unit}.",
    ),
    "removed": (
        "What went away was {step} {unit}.",
        "The loss was {step} {unit}.",
    ),
    "times": (
        "{a} times as many is {step} {unit}.",
        "That grew to {step} {unit}.",
    ),
    "fraction": (
        "{Part} of that is {step} {unit}.",
        "The part that went was {step} {unit}.",
    ),
    "share": (
        "One of {a} shares is {step} {unit}.",
        "Each share was {step} {unit}.",
    ),
    "other_more": (
        "{friend} had {step} {unit}.",
        "For {friend} it was {step} {unit}.",
    ),
    "other_less": (
        "{friend} had {step} {unit}.",
        "For {friend} it was {step} {unit}.",
    ),
    "both": (
        "Together they had {step} {unit}.",
        "Both together made {step} {unit}.",
    ),
    "price": (
        "Selling them brought {step} dollars.",
        "The {unit} were sold for {step} dollars.",
    ),
}

#: a share that is lost, and what to divide by
PARTS: tuple[tuple[str, int], ...] = (
    ("half", 2),
    ("50%", 2),
    ("a third", 3),
    ("a quarter", 4),
    ("25%", 4),
    ("a fifth", 5),
    ("20%", 5),
    ("10%", 10),
    ("a tenth", 10),
)
