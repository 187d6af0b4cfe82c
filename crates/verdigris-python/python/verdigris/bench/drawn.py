"""Problems drawn at random from ``bench/lists/drawn.toml``: what no choice, coefficient or kernel has seen.

The head of that file tells what its fields mean.
"""

import math
import random
from pathlib import Path
from typing import Callable, Dict, List, Union

from .problems import BYTES, DIRECTIONS, DRAWN, Conv, Gemm, ListError, Problem, _table, key, traffic_bytes

#: Draws of one row before its table is said to ask for what does not exist.
MOST_DRAWS = 10_000

#: A field that no table has to give.
DEFAULTS = {"stride": 1, "dilation": 1, "groups": 1, "dims": 2, "batch": 1}


def value_of(field: Union[int, dict], rng: random.Random):
    """One value of a field. ``random()`` alone is asked, which gives the same numbers in every version of Python."""
    if not isinstance(field, dict):
        return field
    if "any" in field:
        return field["any"][int(rng.random() * len(field["any"]))]
    low, high, of = field["from"], field["to"], field.get("of", 1)
    value = math.exp(math.log(low) + rng.random() * (math.log(high) - math.log(low)))
    return min(max(round(value / of) * of, -(-low // of) * of), high // of * of)


def _conv(table: dict, direction: str, rng: random.Random) -> Conv:
    get = lambda name: value_of(table.get(name, DEFAULTS.get(name)), rng)
    dtype, layout, dims = get("dtypes"), get("layouts"), table.get("dims", DEFAULTS["dims"])
    n, per_c, per_k, groups = get("n"), get("c"), get("k"), get("groups")
    extent, filter, stride, dilation = get("input"), get("filter"), get("stride"), get("dilation")
    # Images are square, and one in four is not.
    input = tuple(extent if rng.random() < 0.75 else max(1, round(extent * (0.5 + rng.random()))) for _ in range(dims))
    pad = dilation * (filter - 1) // 2 if rng.random() < 0.8 else 0
    c, k = per_c * groups, per_k * groups
    words = "x".join(map(str, input))
    base = f"{n}x{c}to{k}of{groups}-{words}-f{filter}s{stride}p{pad}d{dilation}"
    each = lambda value: (value,) * dims
    taps = each(filter), each(stride), each(pad), each(dilation)
    return Conv(f"{DRAWN}{table['class']}", base, direction, dtype, layout, n, c, k, input, *taps, groups)


def _gemm(table: dict, _direction: str, rng: random.Random) -> Gemm:
    get = lambda name: value_of(table.get(name, DEFAULTS.get(name)), rng)
    dtype, letters = get("dtypes"), get("layouts")
    # Eight-bit operands are multiplied along rows alone.
    letters = "nt" if dtype in ("fp8", "int8") else letters
    return Gemm(f"{DRAWN}{table['class']}", dtype, letters, get("batch"), get("m"), get("n"), get("k"))


def _fits(problem: Problem, table: dict, limits: dict) -> bool:
    if isinstance(problem, Conv) and min(problem.output) < 1:
        return False
    small = problem.flops <= limits["most_gflop"] * 1e9 and traffic_bytes(problem) <= limits["most_mib"] << 20
    return small and table.get("kind", problem.kind) == problem.kind


def _rows(table: dict, draw: Callable, limits: dict, rng: random.Random) -> List[Problem]:
    found: Dict[str, Problem] = {}
    for i in range(table["rows"]):
        for _ in range(MOST_DRAWS):
            problem = draw(table, DIRECTIONS[i % len(DIRECTIONS)], rng)
            if problem.dtype not in BYTES:
                raise ListError(f"class {table['class']}: dtype {problem.dtype}: {', '.join(BYTES)}")
            if _fits(problem, table, limits) and key(problem) not in found:
                found[key(problem)] = problem
                break
        else:
            raise ListError(f"class {table['class']}: no problem within the limits and of kind {table.get('kind')} in {MOST_DRAWS} draws")
    return list(found.values())


def draw(path: Path, suite: str, seed: int) -> List[Problem]:
    """The rows that a seed draws for a suite."""
    tables = _table(path)
    made: List[Problem] = []
    for table in tables.get(suite, []):
        # A generator a table: a new table does not change what the others draw.
        rng = random.Random(f"{seed} {suite} {table['class']}")
        made += _rows(table, {"conv": _conv, "gemm": _gemm}[suite], tables["limits"], rng)
    return made
