"""The numbers inside the sentences of README.md, of the pages under docs/ and of slides/talk.md.

A page that a person edits has the bare number. results/sentences.txt says what it is:

    [README.md]

    on an NVIDIA H100 is {} times as fast as those six
        cross h100-80gb-hbm3/5_gating_unfused layer: six kernels | h100-80gb-hbm3/6_gating_fused layer: clusters

An entry is some words of a sentence, or a row of a table, with {} where the numbers stand; then, indented, a line for
each {} that says where the number is from (see update_readme.py). The words stand on the page exactly once, however its
lines are broken. An entry without {} has a number that looks measured, and is not; its indented line says what it is
instead. Lines that start with # are comments.

A number of which no entry tells is unheld if a unit follows it (see UNIT), or stands above it in a table.
"""
import re
from dataclasses import dataclass

from record import Mistake

NUMBER = r"\d+(?:\.\d+)?"
RATE = r"(?:[kMGT]?(?:B|FLOP)/s|[kMGT]Hz)"
UNIT = rf"(?:ms|us|ns|{RATE}|%|per cent|times|cycles)"
GAP = r"[ *]*\n?[ *]*"  # a line may end between a number and its unit, a paragraph may not
MEASURED = re.compile(  # whole numbers of bytes are sizes, such as 228 KB, and others are counted
    rf"(?<![\w.^])(?:{NUMBER}(?={GAP}(?:{UNIT}|[kMGT]?FLOP)(?!\w))|\d+\.\d+(?=(?:x|{GAP}[kMG]B)(?!\w)))"
)
TABLE = re.compile(r"^\|.*\n\|[-:| ]+\|\n(?:\|.*\n?)*", re.M)
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.M | re.S)


@dataclass
class Entry:
    page: str
    words: str
    sources: list  # of the numbers; of an entry without numbers, what its words are
    line: int

    @property
    def numbers(self):
        return self.words.count("{}")

    def found(self, text):
        """All places of its words in a page's text, as matches with a group for each {}."""
        words = [re.escape(word).replace(r"\{\}", f"({NUMBER})") for word in self.words.split()]
        return list(re.finditer(r"(?<![\w.])" + r"\s+".join(words) + r"(?![\w])(?!\.\d)", text))

    def says(self, what):
        return Mistake(f"results/sentences.txt, line {self.line}, for {self.page}: {what}")


def entries(text):
    """What results/sentences.txt has, in its order."""
    page, words, sources, start, made = None, [], [], 0, []

    def end():
        if words:
            entry = Entry(page, " ".join(words), list(sources), start)
            if len(sources) != max(1, entry.numbers):
                raise entry.says(f"{entry.numbers} numbers, but {len(sources)} lines that say what they are")
            made.append(entry)
        words.clear()
        sources.clear()

    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            end()
        elif line.startswith("[") and line.endswith(".md]"):
            end()
            page = line[1:-1]
        elif line.startswith("    "):
            sources.append(line.strip())
        else:
            if sources:
                end()
            if not words:
                start = number
            words.append(line.strip())
    end()
    return made


def filled(text, generated, of_page, number_of):
    """A page's text with the right numbers; `generated` matches what the script writes as a whole, in which no words
    are looked for, and number_of(source) is a number as text."""
    hidden = blanked(text, generated)
    changes = {}
    found = [(entry, entry.found(hidden)) for entry in of_page]
    lost = [entry.says(f"its words stand {len(places)} times on the page: {entry.words}")
            for entry, places in found if len(places) != 1]
    if lost:
        raise Mistake("\n".join(map(str, lost)))
    for entry, places in found:
        for group in range(1, entry.numbers + 1):
            try:
                new = number_of(entry.sources[group - 1])
            except Mistake as error:
                raise entry.says(f"cannot be filled in: {error}") from error
            start, end = places[0].span(group)
            if changes.setdefault(start, (end, new)) != (end, new):
                raise entry.says("another entry gives one of its numbers another value")
    for start, (end, new) in sorted(changes.items(), reverse=True):
        text = text[:start] + new + text[end:]
    return text


def blanked(text, *patterns):
    """The text with as many blanks where one of the patterns matches."""
    for pattern in patterns:
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return text


def looks_measured(text):
    """The places, (start, end), of all numbers that a unit follows, or stands above in a table."""
    places = {match.span() for match in MEASURED.finditer(text)}
    for table in TABLE.finditer(text):
        head, _, *rows = table[0].splitlines(keepends=True)
        measured = [bool(re.search(rf"(?<!\w){UNIT}(?!\w)", cell)) for cell in head.split("|")]
        start = table.end() - sum(map(len, rows))
        for row in rows:
            at = start
            for cell, wanted in zip(row.split("|"), measured):
                number = re.fullmatch(rf"[\s*]*({NUMBER})[\s*]*", cell)
                if wanted and number:
                    places.add((at + number.start(1), at + number.end(1)))
                at += len(cell) + 1
            start += len(row)
    return sorted(places)


def unheld(text, generated, of_page):
    """[(line, what stands there)] of the numbers that look measured, and that no entry holds."""
    hidden = blanked(text, generated)
    held = []
    for entry in of_page:
        for place in entry.found(hidden):
            held += [place.span(group) for group in range(1, entry.numbers + 1)] or [place.span()]
    return [(text.count("\n", 0, start) + 1, " ".join(text[max(0, start - 50):end + 20].split()))
            for start, end in looks_measured(blanked(hidden, CODE))
            if not any(first <= start and end <= last + 1 for first, last in held)]
