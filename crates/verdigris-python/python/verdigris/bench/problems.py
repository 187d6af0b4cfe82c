"""The problems of a bench: what one row asks, how much work it is, and how lists of them are read.

A list is a TOML file of ``[[group]]`` tables; a group is the product of its problems with directions or layouts and dtypes. The head of each file in
``bench/lists`` says what its fields mean. The program ``workshop bench`` reads the same files, and names rows as this module does.
"""

import dataclasses
import math
from pathlib import Path
from typing import Iterator, List, Optional, Sequence, Tuple, Union

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.9 and 3.10
    try:
        import tomli as tomllib
    except ModuleNotFoundError:
        tomllib = None

CHANNELS_LAST = "channels-last"
CHANNELS_FIRST = "channels-first"
DIRECTIONS = ("fprop", "dgrad", "wgrad")

#: Bytes of an operand's element and of a result's, by dtype class. f32 operands are rounded to tf32 on their way into the tensor core in class
#: ``tf32``, and multiplied as they are in class ``f32``; ``fp8`` is e4m3 with a bf16 result; ``int8`` has i32 results.
BYTES = {"bf16": (2, 2), "f16": (2, 2), "tf32": (4, 4), "f32": (4, 4), "fp8": (1, 2), "int8": (1, 4)}


#: What the classes of drawn rows begin with (see ``drawn``).
DRAWN = "drawn_"


class ListError(ValueError):
    """A list that cannot be read, or a selection that leaves nothing of it."""


@dataclasses.dataclass(frozen=True)
class Conv:
    """One convolution in one direction. Spatial extents stand outermost first; one to three of them."""

    cls: str
    base: str
    direction: str
    dtype: str
    layout: str
    n: int
    c: int
    k: int
    input: Tuple[int, ...]
    filter: Tuple[int, ...]
    stride: Tuple[int, ...]
    pad: Tuple[int, ...]
    dilation: Tuple[int, ...]
    groups: int

    suite = "conv"

    @property
    def name(self) -> str:
        return f"{self.base}-{self.direction}"

    @property
    def output(self) -> Tuple[int, ...]:
        dims = zip(self.input, self.filter, self.stride, self.pad, self.dilation)
        return tuple((i + 2 * p - d * (f - 1) - 1) // s + 1 for i, f, s, p, d in dims)

    @property
    def kind(self) -> str:
        """What decides which bar the row counts for; the first of these that holds.

        ``first``: four input channels at most. ``depthwise``: one channel a group. ``grouped``: more of them. ``volume``: three spatial dims.
        ``odd``: C or K is no multiple of 8. ``dense``: all others.
        """
        if self.c <= 4:
            return "first"
        if self.groups > 1:
            return "depthwise" if self.groups == self.c else "grouped"
        if len(self.input) == 3:
            return "volume"
        return "odd" if self.c % 8 or self.k % 8 else "dense"

    @property
    def x_shape(self) -> Tuple[int, ...]:
        return (self.n, self.c) + self.input

    @property
    def w_shape(self) -> Tuple[int, ...]:
        return (self.k, self.c // self.groups) + self.filter

    @property
    def y_shape(self) -> Tuple[int, ...]:
        return (self.n, self.k) + self.output

    @property
    def operand_shapes(self) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
        """Shapes of the two operands: x and w, dy and w, or dy and x."""
        return {
            "fprop": (self.x_shape, self.w_shape),
            "dgrad": (self.y_shape, self.w_shape),
            "wgrad": (self.y_shape, self.x_shape),
        }[self.direction]

    @property
    def result_shape(self) -> Tuple[int, ...]:
        return {"fprop": self.y_shape, "dgrad": self.x_shape, "wgrad": self.w_shape}[self.direction]

    @property
    def terms(self) -> int:
        """Most products that are summed up for one element of the result."""
        taps = math.prod(self.filter)
        if self.direction == "fprop":
            return self.c // self.groups * taps
        if self.direction == "dgrad":
            return self.k // self.groups * math.prod(-(-f // s) for f, s in zip(self.filter, self.stride))
        return self.n * math.prod(self.output)

    @property
    def flops(self) -> float:
        """Two for each product of the forward convolution, taps that fall into the padding counted too, as is customary."""
        return 2.0 * math.prod(self.y_shape) * (self.c // self.groups) * math.prod(self.filter)

    @property
    def sizes(self) -> dict:
        fields = ("n", "c", "k", "input", "filter", "stride", "pad", "dilation", "groups")
        return {field: getattr(self, field) for field in fields}


@dataclasses.dataclass(frozen=True)
class Gemm:
    """``D[batch, m, n] = A[batch, m, k] . B[batch, k, n]``; ``letters`` as in the head of ``gemm.toml``; leading dimensions in elements or None."""

    cls: str
    dtype: str
    letters: str
    batch: int
    m: int
    n: int
    k: int
    lda: Optional[int] = None
    ldb: Optional[int] = None
    ldd: Optional[int] = None

    suite = "gemm"
    direction = "product"

    @property
    def layout(self) -> str:
        return self.letters

    @property
    def name(self) -> str:
        batch = f"{self.batch}x" if self.batch != 1 else ""
        leading = "".join(f"-ld{of}{ld}" for of, ld in (("a", self.lda), ("b", self.ldb), ("d", self.ldd)) if ld is not None)
        return f"{batch}{self.m}x{self.n}x{self.k}-{self.letters}{leading}"

    @property
    def strides(self) -> Tuple[Tuple[int, int], Tuple[int, int], Tuple[int, int]]:
        """(row stride, column stride) of A, B and D."""

        def of(letter, rows, columns, leading):
            if letter == "n":
                return (leading or columns, 1)
            return (1, leading or rows)

        return (
            of(self.letters[0], self.m, self.k, self.lda),
            of(self.letters[1], self.k, self.n, self.ldb),
            of("n", self.m, self.n, self.ldd),
        )

    @property
    def kind(self) -> str:
        """``odd`` where a row of A, B or D is no multiple of 16 bytes; ``dense`` otherwise."""
        operand, result = BYTES[self.dtype]
        leads = [max(pair) for pair in self.strides]
        is_odd = any(lead * size % 16 for lead, size in zip(leads, (operand, operand, result)))
        return "odd" if is_odd else "dense"

    @property
    def operand_shapes(self):
        return ((self.batch, self.m, self.k), (self.batch, self.k, self.n))

    @property
    def result_shape(self):
        return (self.batch, self.m, self.n)

    @property
    def terms(self) -> int:
        return self.k

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def sizes(self) -> dict:
        fields = ("batch", "m", "n", "k", "lda", "ldb", "ldd")
        return {field: getattr(self, field) for field in fields if getattr(self, field) is not None}


Problem = Union[Conv, Gemm]


def key(problem: Problem) -> str:
    """Names a row among all rows of its suite, for ever."""
    return f"{problem.cls}/{problem.dtype}/{problem.layout}/{problem.name}"


def identity(problem: Problem) -> dict:
    """What a record says of a row before anything is measured."""
    return {
        "key": key(problem),
        "class": problem.cls,
        **({"drawn": True} if problem.cls.startswith(DRAWN) else {}),
        "name": problem.name,
        "bar_kind": problem.kind,
        "direction": problem.direction,
        "dtype": problem.dtype,
        "layout": problem.layout,
        "flops": problem.flops,
        "bytes": traffic_bytes(problem),
        "sizes": {name: list(value) if isinstance(value, tuple) else value for name, value in problem.sizes.items()},
    }


def operand_bytes(problem: Problem) -> int:
    """Bytes of both operands."""
    return sum(math.prod(shape) for shape in problem.operand_shapes) * BYTES[problem.dtype][0]


def traffic_bytes(problem: Problem) -> int:
    """Operands read once, as far as they are read at all, and the result written once."""
    operand, result = BYTES[problem.dtype]
    read = operand_bytes(problem)
    if isinstance(problem, Conv) and problem.direction != "dgrad":
        # Between filters that are smaller than their stride lie pixels that nobody reads.
        touched = math.prod(min(i, o * f) for i, o, f in zip(problem.input, problem.output, problem.filter))
        read -= problem.n * problem.c * (math.prod(problem.input) - touched) * operand
    return read + math.prod(problem.result_shape) * result


def _table(path: Path) -> dict:
    if tomllib is None:
        raise ListError("reading lists needs Python 3.11, or the package tomli")
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ListError(f"{path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ListError(f"{path}: {error}") from error


def _each(value, rank: int) -> Tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * rank
    if len(value) != rank:
        raise ListError(f"{value}: one number, or as many as there are spatial dims ({rank})")
    return tuple(value)


def _convs(group: dict, layout: str) -> Iterator[Conv]:
    for one in group["problems"]:
        rank = len(one["input"])
        if not 1 <= rank <= 3 or len(one["filter"]) != rank:
            raise ListError(f"{one['name']}: one to three spatial extents, and as many of the filter")
        for direction in group["directions"]:
            if direction not in DIRECTIONS:
                raise ListError(f"{one['name']}: direction {direction}: {', '.join(DIRECTIONS)}")
            for dtype in group["dtypes"]:
                conv = Conv(
                    cls=group["class"],
                    base=one["name"],
                    direction=direction,
                    dtype=dtype,
                    layout=layout,
                    n=one["n"],
                    c=one["c"],
                    k=one["k"],
                    input=tuple(one["input"]),
                    filter=tuple(one["filter"]),
                    stride=_each(one.get("stride", 1), rank),
                    pad=_each(one.get("pad", 0), rank),
                    dilation=_each(one.get("dilation", 1), rank),
                    groups=one.get("groups", 1),
                )
                if conv.c % conv.groups or conv.k % conv.groups or min(conv.output) < 1:
                    raise ListError(f"{one['name']}: extents that do not fit each other")
                yield conv


def _gemms(group: dict) -> Iterator[Gemm]:
    for one in group["problems"]:
        for letters in group["layouts"]:
            if len(letters) != 2 or set(letters) - set("nt"):
                raise ListError(f"layouts {letters}: two letters, each n or t")
            for dtype in group["dtypes"]:
                yield Gemm(
                    cls=group["class"],
                    dtype=dtype,
                    letters=letters,
                    batch=one.get("batch", 1),
                    m=one["m"],
                    n=one["n"],
                    k=one["k"],
                    lda=one.get("lda"),
                    ldb=one.get("ldb"),
                    ldd=one.get("ldd"),
                )


def load(paths: Sequence[Path]) -> List[Problem]:
    """Reads lists in their order, rows in the order in which they stand there. A row that is named twice is an error."""
    rows: List[Problem] = []
    known = set()
    for path in paths:
        for group in _table(Path(path)).get("group", []):
            try:
                found = list(_gemms(group) if "layouts" in group else _convs(group, group.get("layout", CHANNELS_LAST)))
            except KeyError as error:
                raise ListError(f"{path}: class {group.get('class')}: the field {error} is missing") from error
            for row in found:
                if row.dtype not in BYTES:
                    raise ListError(f"{path}: {row.name}: dtype {row.dtype}: {', '.join(BYTES)}")
                if key(row) in known:
                    raise ListError(f"{path}: {key(row)} stands there twice")
                known.add(key(row))
                rows.append(row)
    return rows
