"""Draws the pictures beside it that repeat themselves: what is not drawn here was drawn by hand.

    docs/pictures/draw.py [--check]

With --check nothing is written, and the exit code says whether the files are those that this draws.
"""
import argparse
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
INK, SOFT, GREY, PALE, DARK = "#14181f", "#5b6472", "#e4e8ee", "#f4f6f8", "#c3ccd8"
BLUE, SKY, RUST, SAND = "#005a96", "#cfe0ee", "#b94700", "#f3c9ad"


class Picture:
    """A drawing on white, so that it can be read on a dark page, too."""

    def __init__(self, title, width, height, size=18):
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="Inter, Arial, sans-serif" font-size="{size}" fill="{INK}">\n'
            f"  <title>{title}</title>\n"
            f'  <defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L10 5L0 10z" fill="{INK}"/></marker></defs>\n'
            f'  <rect width="{width}" height="{height}" fill="#fff"/>\n'
        )
        self.parts = []

    def box(self, x, y, width, height, fill=GREY, line=None, text="", radius=4, ink=None, size=None, bold=False):
        stroke = f' stroke="{line}" stroke-width="2"' if line else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" '
                          f'fill="{fill}"{stroke}/>')
        if text:
            lines = text.split("\n")
            step = 1.2 * (size or 18)
            top = y + height / 2 - step * (len(lines) - 1) / 2 + 0.35 * (size or 18)
            for number, each in enumerate(lines):
                self.text(x + width / 2, top + number * step, each, "middle", ink, size, bold)

    def text(self, x, y, text, anchor="start", ink=None, size=None, bold=False, aside=False):
        """`aside`: for who reads; the talk leaves it out (slides/build.py)."""
        more = ' class="aside"' if aside else ""
        more += f' fill="{ink}"' if ink else ""
        more += f' font-size="{size}"' if size else ""
        more += ' font-weight="700"' if bold else ""
        more += f' text-anchor="{anchor}"' if anchor != "start" else ""
        text = text.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{more}>{text}</text>')

    def lines(self, x, y, lines, size=16):
        """Lines of text, one below the other."""
        for number, line in enumerate(lines):
            self.text(x, y + 24 * number, line, size=size)

    def line(self, path, ink=INK, arrow=True, dashed=False):
        more = ' marker-end="url(#tip)"' if arrow else ""
        more += ' stroke-dasharray="6 5"' if dashed else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{ink}" stroke-width="2"{more}/>')

    def svg(self):
        return self.head + "".join(f"  {part}\n" for part in self.parts) + "</svg>\n"


def fragment():
    """Which lane holds what of a 16 x 8 result of mma.sync: PTX ISA, mma.m16n8k16, its accumulator."""
    picture = Picture("The fragments of a 16 x 8 result", 1060, 480, 16)
    cell, top = 24, 84
    for pair in range(4):
        picture.text(310 + (pair + 0.5) * 2 * cell, 70, f"{2 * pair}  {2 * pair + 1}", "middle", SOFT, 16)
    for row in range(16):
        picture.text(518, top + row * cell + 17, f"row {row}", size=16, ink=SOFT)
        for pair in range(4):
            lane = 4 * (row % 8) + pair
            mine = lane == 5
            picture.box(310 + pair * 2 * cell, top + row * cell, 2 * cell - 3, cell - 3,
                        RUST if mine else GREY, None, str(lane), 3, "#fff" if mine else INK, 16, mine)
    picture.text(310, 26, "the 16 x 8 result of one mma.sync: the number of the lane", bold=True)
    picture.text(310, 46, "that holds two neighbours of a row, such as columns 0 and 1", size=16, ink=SOFT)
    picture.box(20, 196, 150, 150, SKY, BLUE, "A: 16 x 16\nhalves,\n8 in each lane", 6, size=16)
    picture.box(200, 196, 72, 150, SKY, BLUE, "B:\n16 x 8,\n4 in\neach\nlane", 6, size=16)
    picture.text(185, 277, "x", "middle", size=20)
    picture.text(290, 277, "=", "middle", size=20)
    said = ("The 32 lanes of a warp hold the 128 sums", "together, four each.", "",
            "Lane 5 has columns 2 and 3 of rows 1 and 9.", "",
            "Four neighbouring lanes have a whole row.", "",
            "A is spread over the lanes in the same way:", "its columns 0 to 7 as this picture shows, and",
            "its columns 8 to 15 once more. So what two", "products leave in their registers can be the",
            "left factor of another one: attention (a bonus)", "uses that.", "", "B is spread by columns: lane 5 has rows 2, 3, 10", "and 11 of column 1.")
    for number, line in enumerate(said):
        lane = line.startswith("Lane")
        picture.text(610, 96 + 24 * number, line, ink=RUST if lane else None, bold=lane,
                     aside=number > said.index("Four neighbouring lanes have a whole row."))
    return picture


def multiprocessor():
    """Lesson 1's words for what is inside of a multiprocessor, and where two blocks are on it."""
    picture = Picture("A multiprocessor with two blocks on it", 1080, 470, 17)
    picture.text(20, 30, "one multiprocessor of an H100, and two blocks of 256 threads on it", bold=True)
    picture.box(20, 46, 700, 330, PALE, SOFT)
    for scheduler in range(4):
        left = 34 + scheduler * 171
        picture.box(left, 60, 159, 34, RUST, None, f"scheduler {scheduler}", 4, "#fff", 16, True)
        for slot in range(16):
            fill = SKY if slot < 2 else SAND if slot < 4 else "#fff"
            picture.box(left + slot % 4 * 40, 102 + slot // 4 * 22, 37, 19, fill, SOFT, "", 3)
        picture.box(left, 198, 159, 48, GREY, None, "registers:\n64 KB", size=16)
        picture.box(left, 252, 159, 48, GREY, None, "32 multiply-adds;\na tensor core", size=16)
    picture.box(34, 312, 222, 50, SKY, None, "shared memory\nof block 0", size=16)
    picture.box(260, 312, 222, 50, SAND, None, "shared memory\nof block 1", size=16)
    picture.box(486, 312, 220, 50, GREY, None, "L1 cache: what is left", size=16)
    picture.text(736, 342, "together 256 KB", size=16, ink=SOFT)
    picture.line("M370 378V398")
    picture.box(20, 404, 700, 44, GREY, None, "L2 cache, and behind it the memory: for all 132 multiprocessors",
                size=16)
    said = ("In a cycle a scheduler can start one", "instruction of one of its own warps: such", "as 32 multiply-adds, one for each thread.",
            "", "It has room for 16 warps (small boxes).",
            "Block 0 (blue) has 8 warps, and block 1", "(brown) has 8: four for each scheduler.", "",
            "Both blocks are here only if there are", "registers and shared memory for both.")
    picture.lines(736, 76, said)
    return picture


def owned():
    """Which elements of a tile one thread owns in lesson 2's *registers*, and in *vectors*."""
    picture = Picture("The 64 elements of a thread", 1080, 470, 17)
    unit, side, top = 2.5, 320, 92
    forms = (("registers: every 16th row and column", lambda i, at: at + 16 * i),
             ("vectors: groups of four", lambda i, at: 4 * at + i // 4 * 64 + i % 4))
    for number, (name, place) in enumerate(forms):
        left = 70 + number * 400
        picture.text(left - 50, 30, name, bold=True)
        picture.text(left, 56, "a row of the tile of B", size=16, ink=SOFT)
        picture.box(left, top - 24, side, 14, SKY, None, "", 0)
        picture.box(left - 24, top, 14, side, SAND, None, "", 0)
        picture.box(left, top, side, side, GREY, None, "", 0)
        rows, cols = ([place(i, at) for i in range(8)] for at in (2, 3))
        for col in cols:
            picture.box(left + col * unit, top - 24, 4, 14, BLUE, None, "", 0)
        for row in rows:
            picture.box(left - 24, top + row * unit, 14, 4, RUST, None, "", 0)
            for col in cols:
                picture.box(left + col * unit, top + row * unit, 4, 4, INK, None, "", 0)
    picture.text(46, 438, "At the left of each tile of C: a column of the tile of A. This thread is x = 3, y = 2.",
                 size=16, ink=SOFT)
    said = ("A tile of C has 128 x 128", "elements. A thread owns 64", "of them (black).", "",
            "For one k it reads 8 numbers", "of A (brown) and 8 of B", "(blue), and multiplies each", "with each.", "",
            "In groups of four they lie", "side by side, and one", "instruction reads four.")
    picture.lines(830, 106, said)
    return picture


def swizzle():
    """ldmatrix reads piece 2 of eight rows: where these lie in three forms of a tile."""
    picture = Picture("A tile as it lies, padded, and swizzled", 1080, 424)
    cell, top = 36, 92
    forms = (("as it lies", "all eight in the same 4 banks:", "8 turns", lambda row, piece: piece),
             ("padded: an empty piece a row", "8 different groups of banks:", "1 turn; but rows are longer",
              None),
             ("swizzled: p of row r at p ^ r", "8 different groups of banks:", "1 turn, and nothing is longer",
              lambda row, piece: piece ^ row))
    for number, (name, said, turns, place) in enumerate(forms):
        left = 30 + number * 360
        padded = number == 1
        picture.text(left, 32, name, bold=True, size=17)
        picture.text(left, 56, "banks 0 to 31, four in each column", ink=SOFT, size=16)
        # A line is all banks once. Padded rows have nine pieces, the last of them empty.
        there = {(9 * row + piece if padded else 8 * row + place(row, piece)): (row, piece)
                 for row in range(8) for piece in range(9 if padded else 8)}
        for line in range(9 if padded else 8):
            for column in range(8):
                row, piece = there[8 * line + column]
                if piece == 8:
                    picture.box(left + column * cell, top - 20 + line * 30, cell - 3, 27, "#fff", SOFT, "", 3)
                    continue
                read = piece == 2
                fill = BLUE if read else DARK if row % 2 else PALE
                picture.box(left + column * cell, top - 20 + line * 30, cell - 3, 27, fill, None, str(piece), 3,
                            "#fff" if read else INK, 16, read)
        picture.text(left, 362, said, size=16)
        picture.text(left, 384, turns, size=16, bold=True, ink=BLUE if number else RUST)
    picture.text(30, 414, "A row of the tile is eight pieces of 16 bytes, 0 to 7; every other row is "
                 "darker. One ldmatrix reads piece 2 of eight rows.", size=16, ink=SOFT)
    return picture


def split_k():
    """Lesson 7's three ideas, as who has which vertices, and where they meet."""
    picture = Picture("Half fused, split-K, one launch", 1150, 470, 17)
    colors = (SKY, SAND, "#d9e8c9", "#e3d4ec")

    def vertices(x, y, height, bands):
        for band in range(bands):
            picture.box(x, y + band * height / bands, 64, height / bands - 3, colors[band % 4] if bands > 1 else SKY)
        picture.text(x + 32, y - 10, "x: V rows", "middle", size=16, ink=SOFT)

    def out(x, y, height, bands=1):
        for band in range(bands):
            picture.box(x, y + band * height / bands, 56, height / bands - 3, colors[band % 4] if bands > 1 else SKY)
        picture.text(x + 28, y - 10, "out", "middle", SOFT, 16)

    top, height = 84, 250
    picture.text(20, 30, "half fused", bold=True, size=20)
    vertices(20, top, height, 1)
    picture.line("M90 209H120")
    for tile in range(8):
        picture.box(126 + tile % 2 * 42, 130 + tile // 2 * 42, 38, 38, SKY, BLUE)
    picture.line("M210 209H230")
    picture.box(234, 184, 62, 50, RUST, None, "damp", 6, "#fff", 16, True)
    picture.line("M300 209H320")
    out(324, top, height)
    picture.text(20, 380, "A spectrum of 128 x 256 is eight tiles: eight", size=16)
    picture.text(20, 402, "blocks. Each walks over all vertices. A second", size=16)
    picture.text(20, 424, "launch damps, a third one expands.", size=16)

    left = 405
    picture.text(left, 30, "split-K", bold=True, size=20)
    vertices(left, top, height, 4)
    for band in range(4):
        y = top + (band + 0.5) * height / 4
        picture.line(f"M{left + 70} {y:g}H{left + 96}")
        picture.box(left + 100, y - 22, 72, 42, colors[band], None, "partial\nsum", size=16)
        picture.line(f"M{left + 176} {y:g}L{left + 206} {209 + 14 * (band - 1.5):g}")
    picture.box(left + 210, 172, 76, 74, RUST, None, "add,\nthen\ndamp", 6, "#fff", 16, True)
    picture.line(f"M{left + 290} 209H{left + 310}")
    out(left + 314, top, height)
    picture.text(left, 380, "Slices of the vertices, a block for each slice", size=16)
    picture.text(left, 402, "and tile: hundreds of blocks. A second launch", size=16)
    picture.text(left, 424, "adds the slices, a third one expands.", size=16)

    left = 800
    picture.text(left, 30, "one launch", bold=True, size=20)
    vertices(left, top, height, 4)
    for band in range(4):
        y = top + (band + 0.5) * height / 4
        picture.line(f"M{left + 70} {y - 8:g}L{left + 130} {196 + 10 * (band - 1.5):g}")
        picture.line(f"M{left + 230} {196 + 10 * (band - 1.5):g}L{left + 286} {y - 8:g}")
    picture.box(left + 136, 166, 90, 66, RUST, None, "one sum\nin L2", 6, "#fff", 16, True)
    picture.line(f"M{left + 181} 84V160", RUST, False, True)
    picture.line(f"M{left + 181} 236V334", RUST, False, True)
    picture.text(left + 181, 76, "all blocks meet", "middle", RUST, 16)
    out(left + 290, top, height, 4)
    picture.text(left, 380, "Each block adds what its rows contribute,", size=16)
    picture.text(left, 402, "waits until all have, takes the sum back,", size=16)
    picture.text(left, 424, "and walks over its rows again. Some of", size=16)
    picture.text(left, 446, "these are still on chip.", size=16)
    return picture


def gradients():
    """Lesson 8: what stays on chip, and what streams past it."""
    picture = Picture("Associated: what stays, and what streams", 1060, 350, 17)
    picture.text(20, 30, "one kernel: 4 V E W + 8 V W W operations", bold=True)
    picture.box(20, 60, 60, 200, SKY, None, "Gr, Gi\n\nE wide", size=16)
    picture.line("M84 160H128")
    picture.box(134, 60, 100, 200, RUST, None, "xr, xi\n\nstay\non chip\n\nW wide", 6, "#fff", 16, True)
    picture.box(240, 110, 100, 100, SAND, None, "Lr, Li\nstream\npast", size=16)
    picture.line("M344 160H396")
    picture.box(402, 60, 60, 200, SKY, None, "out", size=16)
    picture.text(20, 296, "The large products, ar and ai, have W terms for each sum.", size=16)

    picture.text(560, 30, "associated: 12 V E W operations", bold=True)
    picture.box(560, 60, 100, 70, SAND, None, "Lr, Li", size=16)
    picture.box(560, 160, 100, 56, SAND, None, "x: E rows", size=16)
    picture.line("M664 96L706 140")
    picture.line("M664 188L706 166")
    picture.box(712, 118, 120, 84, RUST, None, "x, M1, M2\nstay on chip\nE rows", 6, "#fff", 16, True)
    picture.box(836, 60, 74, 200, SKY, None, "Gr, Gi\nstream\npast", size=16)
    picture.line("M914 160H960")
    picture.box(966, 60, 60, 200, SKY, None, "out", size=16)
    picture.text(560, 296, "M1 = x Lr^T and M2 = x Li^T are small: E rows, however", size=16)
    picture.text(560, 318, "many vertices there are. All sums have E terms.", size=16)
    return picture


def softmax():
    """Lesson 9: how the parts of a row come together."""
    picture = Picture("A row of logits in four blocks", 1060, 430, 17)
    parts = ((3, 2.0), (5, 1.5), (1, 2.4), (4, 1.2))
    picture.text(20, 30, "one row of logits l, in the registers of four blocks", bold=True)
    for number, (most, total) in enumerate(parts):
        left = 20 + number * 260
        for column in range(8):
            picture.box(left + column * 29, 50, 26, 40, SKY, None)
        picture.line(f"M{left + 115} 94V128")
        said = f"maximum {most}\nsum of exp(l - {most}): {total:g}"
        picture.box(left + 20, 134, 192, 56, SAND, RUST, said, 6, size=16)
        picture.line(f"M{left + 116} 194L{480 + 30 * number} 236")
        picture.text(left + 116, 374, f"exp(l - {most}) exp({most} - 5) / s", "middle", size=16)
        picture.line(f"M{480 + 30 * number} 312L{left + 116} 352")
        for column in range(8):
            picture.box(left + column * 29, 386, 26, 30, BLUE, None)
    picture.box(230, 242, 600, 66, RUST, None,
                "m = max(3, 5, 1, 4) = 5\ns = 2 exp(3-5) + 1.5 exp(5-5) + 2.4 exp(1-5) + 1.2 exp(4-5)",
                6, "#fff", 16, True)
    picture.text(850, 268, "8 bytes a part,", size=16, ink=SOFT)
    picture.text(850, 290, "not the logits", size=16, ink=SOFT)
    return picture


def clifford():
    """Lesson 10: a row in a block; a thread per feature; the norm over the row."""
    picture = Picture("A block owns a row", 1060, 380, 17)
    picture.text(20, 30, "a block owns a row of the batch: 1024 features of 8 coefficients", bold=True)
    names = ("1", "e1", "e2", "e3", "e12", "e13", "e23", "e123")
    for which, (left, color) in enumerate(((70, SKY), (400, SAND))):
        picture.text(left - 6, 60, "x, a plane for each coefficient" if not which else "y", size=16, ink=SOFT)
        for row, name in enumerate(names):
            picture.text(left - 8, 89 + row * 26, name, "end", SOFT, 16)
            for feature in range(9):
                mine = feature == 3
                picture.box(left + feature * 26, 72 + row * 26, 23, 23, (BLUE if mine else color))
    picture.line("M160 286V318H700V250")
    picture.line("M490 286V318", arrow=False)
    picture.text(190, 346, "one thread has one feature: all 8 coefficients of x and of y, in registers",
                 size=16, ink=BLUE)
    said = "64 terms\nwith signs\nand weights:\n92 instructions,\nwritten by the\ncompiler"
    picture.box(650, 100, 150, 144, BLUE, None, said, 6, "#fff", 16)
    picture.line("M804 170H838")
    picture.box(844, 100, 200, 66, RUST, None, "norm: a sum over\nall features\nof the row", 6, "#fff", 16, True)
    picture.line("M944 170V206")
    picture.box(844, 212, 200, 34, SKY, None, "out = z / norm", size=16)
    picture.text(650, 60, "unfused: 26 kernels,", size=16, ink=SOFT)
    picture.text(650, 82, "each reads and writes such planes", size=16, ink=SOFT)
    return picture


def attention():
    """The bonus: the walk over the keys, and the turns of two warpgroups."""
    picture = Picture("A block walks over the keys; two warpgroups take turns", 1100, 440, 17)
    picture.text(20, 30, "a block walks over the keys", bold=True)
    picture.box(90, 66, 250, 44, PALE, SOFT)
    for tile in range(5):
        picture.box(94 + tile * 49, 70, 45, 36, BLUE if tile == 2 else SKY, None, "", 3)
    picture.text(80, 94, "K, V", "end")
    picture.box(20, 130, 60, 250, PALE, SOFT)
    picture.box(24, 230, 52, 50, BLUE, None, "Q", 3, "#fff", 16, True)
    picture.box(90, 130, 250, 250, "#fff", SOFT)
    picture.box(92, 230, 246, 50, SKY, None, "", 3)
    picture.box(192, 230, 45, 50, RUST, None, "", 3)
    picture.line("M326 300H100")
    picture.text(214, 322, "tile after tile, the last one first", "middle", size=16)
    picture.text(214, 160, "S x T logits: never all there,", "middle", SOFT, 16)
    picture.text(214, 180, "and never in memory", "middle", SOFT, 16)
    picture.line("M344 255H376")
    picture.box(382, 200, 150, 112, SAND, RUST, "of each row:\nlargest logit,\nsum, and the\nrow of out", 6, size=16)
    picture.text(20, 414, "A larger logit comes: sum and row of out are multiplied by one factor.", size=16)

    picture.text(600, 30, "ping-pong: two warpgroups take turns", bold=True)
    width = 92
    for group in range(2):
        y = 80 + group * 90
        picture.text(600, y - 8, f"warpgroup {group}", size=16, ink=SOFT)
        for step in range(5 - group):
            products = step % 2 == 0
            picture.box(600 + (step + group) * width, y, width - 4, 46, BLUE if products else SAND, None,
                        "products" if products else "exp", 4, "#fff" if products else INK, 16)
    picture.line("M600 250H1070")
    picture.text(1070, 270, "time", "end", size=16)
    picture.text(600, 302, "While one computes exponentials, the tensor cores", size=16)
    picture.text(600, 324, "multiply for the other.", size=16)
    return picture


def turns():
    """Lesson 3's first kernels for Hopper: when tiles are copied, and when they are multiplied."""
    picture = Picture("Who copies, and who multiplies", 1080, 440, 17)
    left, unit = 250, 40

    def lane(y, name, spans):
        """Boxes of (units, color, text) one after the other; without a color it is a gap."""
        picture.text(left - 10, y + 24, name, "end", SOFT, 16)
        x = left
        for units, color, text in spans:
            if color:
                ink = "#fff" if color in (BLUE, RUST) else INK
                picture.box(x, y, units * unit - 3, 34, color, None, text, 3, ink, 16)
            x += units * unit

    copy, multiply, wait, store = SKY, BLUE, GREY, RUST
    picture.text(20, 30, "one warpgroup: the same warps order copies, wait, and multiply", bold=True)
    lane(44, "copy engine", [(2, copy, "tile 0"), (2, copy, "1"), (2, copy, "2"), (1, None, ""), (2, copy, "3"),
                             (1, None, ""), (2, copy, "4"), (1, None, ""), (2, copy, "5"), (1, None, ""),
                             (2, copy, "6")])
    lane(84, "four warps", [(2, wait, "wait"), *[(2, multiply, str(step)) if part else (1, wait, "")
                                                 for step in range(6) for part in (1, 0)]])
    picture.text(20, 164, "warp specialization: a producer only copies, consumers multiply; but a tile is "
                 "stored, and the block ends", bold=True)
    lane(178, "copy engine", [*[(1.5, copy, str(step)) for step in range(6)], (4, None, ""),
                              *[(1.5, copy, str(step)) for step in range(5)]])
    lane(218, "consumers", [(1.5, wait, "wait"), *[(1.5, multiply, str(step)) for step in range(6)],
                            (2.5, store, "store"), (1.5, wait, "wait"),
                            *[(1.5, multiply, str(step)) for step in range(4)]])
    picture.text(20, 298, "tile scheduler: the block stays, and its producer already copies for the next tile of C",
                 bold=True)
    lane(312, "copy engine", [*[(1.5, copy, str(step)) for step in range(6)],
                              *[(1.5, copy, str(step)) for step in range(3)], (1, None, ""),
                              *[(1.5, copy, str(step)) for step in range(3, 6)]])
    lane(352, "consumers", [(1.5, wait, "wait"), *[(1.5, multiply, str(step)) for step in range(6)],
                            (1.5, store, "store"), *[(1.5, multiply, str(step)) for step in range(5)]])
    picture.line(f"M{left} 404H1060")
    picture.text(1060, 426, "time", "end", size=16)
    picture.text(20, 426, "The numbers are steps along k. Grey: nothing is multiplied.", size=16, ink=SOFT)
    return picture


def lanes_of(matrices):
    """What lane 5 gets of matrices of 8 x 8 that ldmatrix transposes: [(row, column)] of all of them, if each begins
    at (row, column). PTX ISA, ldmatrix: column lane / 4, rows 2 (lane % 4) and the next one."""
    return {(row + 2 * (5 % 4) + i, col + 5 // 4) for row, col in matrices for i in range(2)}


def grid_of(picture, left, top, cell, rows, cols, color, marked):
    """Cells, of which color(row, col) says the colour; those that are marked stand out."""
    for row in range(rows):
        for col in range(cols):
            fill = RUST if (row, col) in marked else color(row, col)
            picture.box(left + col * cell, top + row * cell, cell - 2, cell - 2, fill, None, "", 2)


def ldmatrix():
    """One ldmatrix of B, transposed: four matrices of 8 x 8 become the right factors of two products."""
    picture = Picture("One ldmatrix loads the right factors of two products", 1120, 500, 16)
    cell, left, top = 16, 112, 100
    first, second = (0, 0), (8, 0)
    marked = lanes_of((first, second, (0, 8), (8, 8)))
    picture.text(20, 30, "1. in shared memory: 16 rows of the tile of B", bold=True)
    picture.text(20, 52, "a row is one k; a lane gives the address of half a row", ink=SOFT)
    for half in range(2):
        picture.text(left + half * 8 * cell + 64, 88, f"columns {8 * half} to {8 * half + 7}", "middle", SOFT, 15)
        picture.text(left - 12, top + half * 128 + 58, "lanes", "end")
        picture.text(left - 12, top + half * 128 + 78, ("0 to 7", "8 to 15")[half], "end")
        picture.text(left + 268, top + half * 128 + 58, "lanes")
        picture.text(left + 268, top + half * 128 + 78, ("16 to 23", "24 to 31")[half])
    grid_of(picture, left, top, cell, 16, 16, lambda row, col: SKY if col < 8 else SAND, marked)
    for number, (row, col) in enumerate((first, second, (0, 8), (8, 8))):
        picture.box(left + (col + 4.5) * cell, top + (row + 4.5) * cell, 42, 42, "#fff", SOFT, str(number), 21, None, 20, True)
    said = ("Matrices 0 to 3 have 8 x 8 elements each.", "Brown: what lane 5 gets of them.")
    picture.lines(20, 396, said)

    picture.text(484, 30, "2. in registers of lane 5", bold=True)
    picture.text(484, 52, "two elements in each", ink=SOFT)
    for number in range(4):
        y = top + 10 + number * 62
        k, col = 8 * (number % 2) + 2, 8 * (number // 2) + 1
        picture.box(484, y, 200, 48, SKY if number < 2 else SAND, RUST, f"b[{number}]: k = {k} and {k + 1},\ncolumn {col}", 6, size=16)
    picture.line("M456 228H480")
    picture.line("M690 228H752")

    picture.text(770, 30, "3. two right factors, 16 x 8", bold=True)
    picture.text(770, 52, "one for each of two mma.sync", ink=SOFT)
    for factor in range(2):
        x = 774 + factor * 180
        picture.text(x + 64, 88, f"columns {8 * factor} to {8 * factor + 7}", "middle", SOFT)
        here = {(row, col - 8 * factor) for row, col in marked if col // 8 == factor}
        grid_of(picture, x, top, cell, 16, 8, lambda row, col: SAND if factor else SKY, here)
        for half in range(2):
            number = 2 * factor + half
            picture.box(x + 4.5 * cell, top + (8 * half + 4.5) * cell, 42, 42, "#fff", SOFT, f"b[{number}]", 8, None, 16, True)
        picture.text(x + 64, 378, f"product {factor}", "middle", SOFT)
    picture.lines(484, 416, ("In a right factor a lane has elements that lie below each other, but", "ldmatrix reads rows. So it transposes each matrix on the way (.trans)."))
    picture.lines(20, 464, ("Of A nothing is transposed. There the four", "matrices are one left factor, 16 x 16."))
    return picture


def mass():
    """Lesson 7: which masses the registers of a transposed left factor are multiplied by."""
    picture = Picture("Mass in the fragments of a transposed factor", 1120, 480, 16)
    cell, top = 16, 130
    at = [(0, 0), (0, 8), (8, 0), (8, 8)]  # of matrices 0 to 3 in the basis: (vertex, eigenvector)
    marked = lanes_of(at)
    fill = {0: SKY, 1: SKY, 2: SAND, 3: SAND}
    number_at = {place: number for number, place in enumerate(at)}
    picture.text(20, 30, "1. in shared memory: 16 rows of the basis", bold=True)
    picture.text(20, 52, "a row is a vertex", ink=SOFT)
    left = 110
    picture.text(left + 128, 92, "16 eigenvectors", "middle", SOFT)
    picture.text(left - 12, top + 118, "16", "end", SOFT)
    picture.text(left - 12, top + 138, "vertices", "end", SOFT)
    grid_of(picture, left, top, cell, 16, 16, lambda row, col: fill[number_at[row // 8 * 8, col // 8 * 8]], set())
    for vertex, eigenvector in sorted(marked):
        picture.box(left + eigenvector * cell, top + vertex * cell, cell - 2, cell - 2, BLUE if vertex < 8 else RUST, None, "", 2)
    for number, (row, col) in enumerate(at):
        picture.box(left + (col + 4.5) * cell, top + (row + 4.5) * cell, 42, 42, "#fff", SOFT, str(number), 21, None, 20, True)
    picture.line("M376 258H428")
    picture.text(402, 240, ".trans", "middle")

    left = 520
    picture.text(440, 30, "2. in registers: basis^T", bold=True)
    picture.text(440, 52, "a left factor; a column is a vertex", ink=SOFT)
    picture.text(left - 12, 92, "mass", "end")
    for vertex in range(16):
        pair = BLUE if vertex in (2, 3) else RUST if vertex in (10, 11) else DARK
        picture.box(left + vertex * cell, 78, cell - 2, 20, pair, None, "", 2)
    picture.text(left + 3 * cell, 72, "low", "middle", BLUE, 16, True)
    picture.text(left + 11 * cell, 72, "high", "middle", RUST, 16, True)
    for vertex, ink in ((3, BLUE), (11, RUST)):
        picture.line(f"M{left + vertex * cell} 100V126", ink)
    grid_of(picture, left, top, cell, 16, 16, lambda row, col: fill[number_at[col // 8 * 8, row // 8 * 8]], set())
    for vertex, eigenvector in sorted(marked):
        picture.box(left + vertex * cell, top + eigenvector * cell, cell - 2, cell - 2, BLUE if vertex < 8 else RUST, None, "", 2)
    for number, (vertex, eigenvector) in enumerate(at):
        picture.box(left + (vertex + 4.5) * cell, top + (eigenvector + 4.5) * cell, 42, 42, "#fff", SOFT, f"a[{number}]", 8, None, 16, True)
    picture.text(left - 12, top + 118, "16 eigen-", "end", SOFT)
    picture.text(left - 12, top + 138, "vectors", "end", SOFT)

    picture.text(810, 30, "3. in lane 5 (dark)", bold=True)
    picture.text(810, 52, "a register has two vertices", ink=SOFT)
    for number, (vertex, eigenvector) in enumerate(at):
        y = top - 34 + number * 82
        ink, name = (BLUE, "low") if vertex == 0 else (RUST, "high")
        picture.box(810, y, 190, 62, SKY if vertex == 0 else SAND, None,
                    f"a[{number}]: vertices {vertex + 2}, {vertex + 3}\nof eigenvector {eigenvector + 1}", 6, size=16)
        picture.text(1008, y + 37, "*", "start", None, 20)
        picture.box(1024, y + 8, 76, 46, ink, None, name, 6, "#fff", 16, True)
    picture.lines(20, 430, ("A register holds two neighbours of a row. In basis^T these are two vertices, with a mass each. So one pair of masses,",
                            "low, serves a[0] and a[1], and another pair, high, serves a[2] and a[3]. A register is multiplied by one instruction."))
    return picture


def tile_backward():
    """Lesson 8, backward, *associated*: the way of one tile of vertices through a block."""
    picture = Picture("The way of one tile through the backward pass", 1120, 500, 16)
    picture.box(20, 60, 140, 300, PALE, SOFT)
    picture.text(20, 30, "copied for this tile", bold=True)
    picture.text(20, 52, "64 vertices", ink=SOFT)
    picture.box(34, 76, 112, 56, SKY, BLUE, "Gr\n64 x E", 4, size=16)
    picture.box(34, 144, 112, 56, SKY, BLUE, "Gi\n64 x E", 4, size=16)
    picture.box(60, 288, 60, 56, SKY, BLUE, "dOut\n64x64", 4, size=16)

    def step(left, number, title):
        picture.text(left, 30, f"{number}. {title}", bold=True)

    step(200, 1, "multiply")
    picture.text(200, 52, "by x, M1, M2, which stay", ink=SOFT)
    picture.box(200, 76, 170, 124, RUST, None, "Gr x,  Gi x\nGr M1 - Gi M2\nGi M1 + Gr M2", 6, "#fff", 16, True)
    picture.line("M164 138H194")
    picture.box(200, 234, 170, 56, GREY, None, "x, M1, M2: E x 64,\nin shared memory", 4, size=16)
    picture.line("M285 232V206")

    step(410, 2, "g, and four products")
    picture.text(410, 52, "element by element", ink=SOFT)
    picture.box(410, 76, 110, 124, SAND, RUST, "xr, xi,\nar, ai:\n64 x 64", 6, size=16)
    picture.line("M374 138H404")
    picture.box(410, 276, 250, 104, RUST, None, "u = xr ar + xi ai\ng = dOut (1 - tanh(u)^2)\nP = g xr,  Q = g xi\nR = g ar,  S = g ai", 6, "#fff", 16, True)
    picture.line("M465 204V270")
    picture.line("M124 316H404")
    picture.box(550, 76, 110, 124, SAND, RUST, "P, Q, R, S:\n64 x 64,\nin shared\nmemory", 6, size=16)
    picture.line("M605 272V206")

    step(700, 3, "multiply")
    picture.text(700, 52, "by tiles, transposed", ink=SOFT)
    picture.box(700, 76, 180, 124, RUST, None, "Gr^T P + Gi^T Q\nGr^T Q - Gi^T P\nGr^T R + Gi^T S", 6, "#fff", 16, True)
    picture.line("M664 138H694")
    picture.line("M90 364V440H790V206", BLUE)
    picture.text(104, 430, "Gr and Gi are still in shared memory, so they are copied only once", ink=BLUE)
    picture.text(20, 480, "Sizes are those of the larger one of two tiles: 64 vertices, 64 of the W columns, all E rows.", ink=SOFT)

    picture.text(916, 30, "added to sums", bold=True)
    picture.text(916, 52, "which stay in registers", ink=SOFT)
    picture.line("M884 138H914")
    picture.box(920, 76, 180, 124, SAND, RUST, "dM1\ndM2\nD\nE x 64 each", 6, size=16)
    picture.line("M1010 204V270")
    picture.box(920, 276, 180, 80, GREY, None, "after the last tile:\nto memory, as the\nsums of one slice", 6, size=16)
    return picture


def attention_backward():
    """The bonus: which block has what of the gradients, where dQ goes, and in which order."""
    picture = Picture("A block has some keys and walks over the queries", 1120, 480, 16)
    picture.text(20, 26, "a block has some keys, and walks over the queries", size=17, bold=True)
    picture.text(270, 56, "keys", "middle", SOFT)
    for column in range(4):
        mine = column == 1
        picture.box(150 + column * 62, 64, 58, 46, BLUE if mine else PALE, SOFT, "K, V" if mine else "", 3, "#fff")
        picture.box(150 + column * 62, 120, 58, 212, SKY if mine else "#fff", SOFT, "", 3)
        picture.box(150 + column * 62, 342, 58, 46, BLUE if mine else PALE, SOFT, "dK, dV" if mine else "", 3, "#fff")
    for row in range(4):
        now = row == 2
        picture.box(60, 120 + row * 54, 80, 50, RUST if now else PALE, SOFT, "Q, dO" if now else "", 3, "#fff")
        picture.box(420, 120 + row * 54, 80, 50, RUST if now else PALE, SOFT, "dQ" if now else "", 3, "#fff")
    picture.box(212, 228, 58, 50, SAND, RUST, "P, dS", 3)
    picture.text(100, 110, "queries", "middle", SOFT)
    picture.line("M274 253H414", RUST)
    picture.text(404, 244, "+", "end", RUST, 20, True)
    picture.line("M241 282V338", BLUE)
    picture.lines(20, 416, ("K, V and the sums of dK and dV stay on the chip. Of P and dS",
                            "there is one tile at a time. To each tile of dQ, in memory,",
                            "all blocks of a head add a part."))

    picture.text(600, 26, "deterministic: parts are added in the order of keys", size=16, bold=True)
    picture.text(600, 56, "block of", ink=SOFT)
    tiles = 4
    for block in range(3):
        y = 72 + block * 66
        picture.text(600, y + 32, f"keys {block}", ink=SOFT)
        for step in range(tiles):
            tile = tiles - 1 - step
            marked = tile == 2
            verb = "store" if block == 0 else "add"
            picture.box(672 + (step + block) * 70, y, 66, 50, RUST if marked else SAND, None, f"{verb}\ndQ {tile}", 4,
                        "#fff" if marked else INK)
    picture.line("M672 282H1100")
    picture.text(1100, 302, "time", "end")
    picture.lines(600, 334, ("A block adds to a tile when the tile's count says that the",
                             "blocks of all keys before have. All take the tiles in the same",
                             "order. So a block that starts one step later finds its turn come",
                             "at every step. In the other kernels each block adds at once:",
                             "then the order, and the last bits, differ from run to run."))
    return picture


def planes():
    """The bonus on multivectors: who makes the 44 planes, and where they are kept."""
    picture = Picture("Three ways of 44 planes to a product", 1120, 390, 16)
    heads = ("who makes planes", "where they are", "who multiplies")
    for which, head in enumerate(heads):
        picture.text(250 + which * 300, 28, head, bold=True, size=17)
    rows = (
        ("unfused,\nplanes first", "a kernel of its own,\nonce for each row", "memory:\nwritten and read again",
         "the next kernel:\nthe library, or lesson 3's product"),
        ("planes in tiles", "each block of a row,\n8 times for 512 features", "its shared memory:\n8 features at a time",
         "the same block,\nwhen these are made"),
        ("planes beside", "three warps of each block,\nonce for each row", "memory, or still\nin the L2 cache",
         "the other warps of all blocks,\nmeanwhile"),
    )
    colors = ((SAND, INK), (GREY, INK), (BLUE, "#fff"))
    for number, (name, *cells) in enumerate(rows):
        y = 48 + number * 92
        for line, each in enumerate(name.split("\n")):
            picture.text(20, y + (44 if "\n" not in name else 34) + line * 22, each, bold=True, size=17)
        for which, cell in enumerate(cells):
            fill, ink = colors[which]
            picture.box(190 + which * 312, y, 272, 74, fill, None, cell, 6, ink)
            if which < 2:
                picture.line(f"M{464 + which * 312} {y + 37}H{500 + which * 312}")
    picture.text(20, 344, "For example, with 512 features a block of planes in tiles has 64 of the result's columns. So eight blocks")
    picture.text(20, 366, "make the same plane, and while a block makes planes it does not multiply.")
    return picture


def clusters():
    """Who fetches what in a cluster of two, four and eight blocks: primitives/hopper/block_grid.cuh."""
    picture = Picture("Who fetches what in a cluster", 1120, 516, 16)
    side, mine = 84, 1

    def cluster(left, stack, beside, title, said):
        """`stack` tiles below each other, `beside` side by side; block 1 and what it fetches are brown."""
        size = side if stack < 4 else 66
        top, a_left = 142, left + 6
        c_left = a_left + 64
        picture.text(left, 30, title, bold=True)
        picture.lines(left, 54, said)
        for col in range(beside):
            for part in range(stack):  # the tile of B: its parts lie side by side
                rank = part + stack * col
                wide = (size - 6) / stack
                picture.box(c_left + col * size + part * wide, top - 40, wide - 2, 34, RUST if rank == mine else SKY, None,
                            str(rank), 3, "#fff" if rank == mine else INK, 16, rank == mine)
        for row in range(stack):
            for part in range(beside):  # the tile of A: its parts lie below each other
                rank = row + stack * part
                high = (size - 6) / beside
                picture.box(a_left + 10, top + row * size + part * high, 46, high - 2, RUST if rank == mine else SKY, None,
                            str(rank), 3, "#fff" if rank == mine else INK, 16, rank == mine)
            for col in range(beside):
                rank = row + stack * col
                picture.box(c_left + col * size, top + row * size, size - 6, size - 6, SAND if rank == mine else GREY,
                            RUST if rank == mine else None, f"block {rank}" if size == side else str(rank), 4, None, 16, rank == mine)
        picture.text(c_left - 8, top - 16, "B", "end", SOFT)
        picture.text(a_left + 2, top + size / 2, "A", "middle", SOFT)

    cluster(20, 2, 1, "two blocks", ("one below the other", "(lesson 3, clusters)"))
    cluster(330, 2, 2, "four blocks", ("two by two", "(the operator)"))
    cluster(640, 4, 2, "eight blocks", ("four by two", "(the operator)"))
    said = ("Grey: the tiles of C,", "one for each block.", "", "Blue and brown: the", "tiles of A and B that",
            "they need. A number", "says which block", "fetches that part.", "", "Brown: block 1, and", "what it fetches.")
    picture.lines(935, 30, said)
    picture.lines(20, 352, ("In one step block 1", "fetches a whole tile of A,", "for itself, and half a tile", "of B, for blocks 0 and 1."))
    picture.lines(330, 352, ("Half a tile of A, for blocks", "1 and 3, and half a tile of", "B, for blocks 0 and 1."))
    picture.lines(640, 442, ("Half a tile of A, for blocks 1 and 5, and", "a fourth of a tile of B, for blocks 0 to 3."))
    picture.text(20, 504, "A block alone fetches a whole tile of A, and one of B. A part of A is some of its rows; a part of B is some of its "
                 "columns, or of its k.", ink=SOFT)
    return picture


def slices():
    """Lesson 7's three ideas in time, on a GPU of six multiprocessors and for a spectrum of two tiles."""
    picture = Picture("Slices of a sum, in time", 1120, 516, 16)
    left, unit, high = 30, 23.5, 19
    colors = (SKY, SAND, "#d9e8c9")

    def panel(top, title, said):
        picture.text(left, top, title, bold=True)
        picture.text(left + 128, top, said, ink=SOFT)
        for row in range(6):
            picture.box(left, top + 10 + row * high, 33 * unit, high - 2, PALE, None, "", 2)
        return top + 10

    def bar(top, row, start, units, color, text="", ink=None):
        picture.box(left + start * unit, top + row * high, units * unit - 2, high - 2, color, None, text, 2, ink, 15)

    def small(top, start, text, units=1.0):
        """A small kernel, or a wait, on all multiprocessors."""
        picture.box(left + start * unit, top, units * unit - 2, 6 * high - 2, RUST, None, text, 2, "#fff", 15, True)

    top = panel(24, "half fused", "a spectrum of two tiles is two blocks: four multiprocessors have nothing to do")
    for row in range(2):
        bar(top, row, 0, 22.5, SKY, f"tile {row}: all 24 steps of the sum")
    small(top, 22.5, "")
    for row in range(6):
        bar(top, row, 23.5, 8, BLUE, "out", "#fff")
    top = panel(184, "split-K", "three slices of each tile are six blocks; a second kernel adds the slices, and damps")
    for row in range(6):
        bar(top, row, 0, 8, colors[row // 2], f"tile {row % 2}, slice {row // 2}")
    small(top, 8, "", 1.5)
    for row in range(6):
        bar(top, row, 9.5, 8, BLUE, "out", "#fff")
    top = panel(344, "one launch", "blocks stay: they add to one sum for each tile, meet, and go on with their own rows")
    for row in range(6):
        bar(top, row, 0, 8, colors[row // 2], f"tile {row % 2}, slice {row // 2}")
    small(top, 8, "", 0.7)
    for row in range(6):
        bar(top, row, 8.7, 7.3, BLUE, "out", "#fff")
    picture.line(f"M{left} 480H{left + 33 * unit:g}")
    picture.text(left + 33 * unit, 502, "time (a drawing, not measured)", "end", SOFT)
    picture.text(left, 502, "A row is one of six multiprocessors.", ink=SOFT)
    picture.lines(840, 52, ("Brown: the sum is damped,", "by a kernel of its own."))
    picture.lines(840, 212, ("Brown: slices are added", "and damped, by a kernel", "of its own."))
    picture.lines(840, 372, ("Brown: all blocks wait for", "the last one. No kernel", "ends here, and a part of", "the basis is still on chip."))
    return picture


def boxes():
    """Lesson 9's operator: where the four boxes of a tile of W begin, if rows of W start anywhere."""
    picture = Picture("Four boxes of W", 1120, 506, 16)
    columns, tile, cell = 333, 192, 22
    picture.text(20, 30, "W has 333 columns: where its rows begin", bold=True)
    for row in range(5):
        y, before = 54 + row * 30, row * columns % 4
        picture.text(20, y + 17, f"row {row}")
        for group in range(3):
            picture.box(90 + group * 4 * cell, y - 2, 4 * cell - 3, 26, PALE, SOFT, "", 2)
        for element in range(12 - before):
            picture.box(92 + (element + before) * cell, y + 1, cell - 7, 20, RUST if element == 0 else SKY, None, "", 2)
        picture.text(372, y + 17, f"set {row % 4}" + (" again" if row == 4 else ""), ink=SOFT)
    picture.lines(500, 70, ("A frame is 16 bytes, four elements. Brown is a row's first", "element. The copy engine needs rows that begin at a frame,",
                            "and that are a multiple of 16 bytes apart. So every fourth", "row is taken into a set of its own, which begins at the",
                            "frame before its first element."))

    picture.text(20, 246, "the tile of columns 192 to 383: where the boxes of the four sets begin", bold=True)
    unit, zero = 9, 590  # pixels of a column; where column 192 is
    for matrix in range(4):
        y = 266 + matrix * 50
        early = 8 * matrix + matrix * columns % 4
        first = tile - early
        assert (matrix * columns + first) % 4 == 0  # the box begins at a multiple of 16 bytes
        picture.text(20, y + 26, f"set {matrix}: from column {first} on" + (f", {early} early" if early else ""))
        if early:
            picture.box(zero - early * unit, y, early * unit - 1, 40, SAND, None, "", 0)
        picture.box(zero, y, 120, 40, SKY, None, "192, 193 ...", 0, size=16)
    picture.line(f"M{zero} 258V472", BLUE, False)
    picture.text(zero - 8, 488, "copied, but not used", "end", SOFT)
    picture.text(zero + 8, 488, "the tile", "start", BLUE)
    picture.lines(730, 276, ("Up to three columns are early, since", "a box begins at a frame. And 8, 16 and", "24 are early for another reason: a warp",
                             "reads one row of each of the four", "sets at a time, eight columns of it.", "So these rows lie in different banks,",
                             "nearly: they begin at 0, 9, 18 and 27."))
    return picture


PICTURES = {drawn.__name__: drawn
            for drawn in (multiprocessor, owned, fragment, swizzle, ldmatrix, turns, clusters, split_k, slices, mass, gradients,
                          tile_backward, softmax, boxes, clifford, attention, attention_backward, planes)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    wrong = []
    for name, drawn in PICTURES.items():
        path, text = HERE / f"{name}.svg", drawn().svg()
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            wrong.append(path.name)
    if wrong:
        print("not what draw.py draws:", *wrong, file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
