"""Names of places and languages in twenty languages, for the demo.

They come from the Unicode Common Locale Data Repository (CLDR), which the package Babel brings along: © Unicode, Inc.,
Unicode License V3 (https://www.unicode.org/license.txt).
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from babel import Locale

# All are written in Latin letters: an alphabet alone gives none of them away.
LANGUAGES = [
    "cs", "cy", "da", "de", "en", "es", "eu", "fi", "fr", "hu",
    "id", "it", "nl", "pl", "pt", "ro", "sv", "sw", "tr", "vi"
]  # fmt: skip
PADDING, START, END, UNKNOWN = range(4)  # codes that stand for no character
LONGEST = 30  # characters; longer names are descriptions
HELD_OUT = 0.15  # of all places and languages


@dataclass(frozen=True)
class Names:
    """Names, and the number of the language that each is in."""

    texts: list[str]
    labels: np.ndarray


def named_things(language: str) -> dict[str, str]:
    """What CLDR has a name for in a language: countries and regions, cities, languages and scripts."""
    locale = Locale.parse(language)
    kinds = {"territory": locale.territories, "language": locale.languages, "script": locale.scripts}
    found = {f"{kind} {code}": name for kind, names in kinds.items() for code, name in names.items()}
    found |= {f"city {zone}": names["city"] for zone, names in locale.time_zones.items() if "city" in names}
    return found


def load(seed: int = 0) -> tuple[Names, Names]:
    """Names to train with and names held out.

    A thing is held out in all languages: when the model sees Tyskland, no form of Germany was there in training. Names
    that several languages share, such as Panama, have no right answer and are left out altogether.
    """
    named = {language: named_things(language) for language in LANGUAGES}
    languages_of = Counter(text for names in named.values() for text in {t.casefold() for t in names.values()})
    things = sorted({thing for names in named.values() for thing in names})
    order = np.random.default_rng(seed).permutation(len(things))
    held_out = {things[k] for k in order[: int(HELD_OUT * len(things))]}
    parts: tuple[dict[str, tuple[str, int]], ...] = ({}, {})  # text and label, by the text in small letters
    for part, wanted in zip(parts, (False, True), strict=True):
        for label, language in enumerate(LANGUAGES):
            for thing, text in named[language].items():
                key = text.casefold()
                usable = languages_of[key] == 1 and len(text) <= LONGEST
                # A city may be called like its region: such a name is where it is in training, and nowhere else.
                if (thing in held_out) == wanted and usable and key not in parts[0]:
                    part.setdefault(key, (text, label))
    train, validation = (
        Names([text for text, _ in part.values()], np.array([label for _, label in part.values()])) for part in parts
    )
    return train, validation


class Alphabet:
    """The characters of the training names; others are one and the same to the model."""

    def __init__(self, texts: list[str]) -> None:
        often = Counter("".join(texts))
        self.characters = sorted(c for c, n in often.items() if n > 1)
        self._codes = {c: k for k, c in enumerate(self.characters, UNKNOWN + 1)}
        self.size = UNKNOWN + 1 + len(self.characters)

    def encode(self, texts: list[str]) -> dict[str, np.ndarray]:
        """The model's inputs: codes between a start and an end mark, padded, and how many of them each name has."""
        rows = [[START, *(self._codes.get(c, UNKNOWN) for c in text), END] for text in texts]
        lengths = np.array([len(row) for row in rows])
        codes = np.full((len(rows), lengths.max()), PADDING)
        for row, values in zip(codes, rows, strict=True):
            row[: len(values)] = values
        return {"text": codes, "length": lengths}
