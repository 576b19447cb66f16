"""Programs that are right and whose answers are not plain: classes, generators, coroutines, values
of the library, functions as arguments. Each passes its test, and its wrong twin fails it.
"""

from __future__ import annotations

import pytest
from rewards_support import Jail

from async_rl.core.types import AssertTest
from async_rl.rewards.verifier.protocol import VerifyRequest

STACK = """
class Stack:
    size = 0
    def __init__(self, items=()): self.items = list(items)
    def push(self, x): self.items.append(x); self.number = x; return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items) + {wrong}
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __setitem__(self, i, x): self.items[i] = x
    def __eq__(self, o): return isinstance(o, Stack) and self.items == o.items
    def __hash__(self): return hash(tuple(self.items))
    def __lt__(self, o): return self.items < o.items
    def __add__(self, o): return Stack(self.items + o.items)
    def __bool__(self): return bool(self.items)
    def __repr__(self): return f'Stack({{self.items}})'
    @property
    def top(self): return self.items[-1]
    @classmethod
    def of(cls, *xs): return cls(xs)
class Full(ValueError): pass
def full(): raise Full('no room')
"""
ON_A_STACK = [
    "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s.pop() == 2 and s.top == 1",
    "s = Stack([1, 2])\nassert list(s) == [1, 2] and s[0] == 1 and len(s) == 2",
    "s = Stack([1, 2])\ns[0] = 5\nassert s[0] == 5 and len(s) == 2",
    "assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2]) and len(Stack([1])) == 1",
    "assert len({Stack([1]), Stack([1])}) == 1 and len(Stack()) == 0",
    "assert Stack([1]) < Stack([2]) and sorted([Stack([2]), Stack([1])])[0].top == 1\n"
    "assert len(Stack()) == 0",
    "assert (Stack([1]) + Stack([2])).items == [1, 2] and len(Stack()) == 0",
    "assert not Stack() and Stack([1]) and len(Stack()) == 0",
    "assert repr(Stack([1])) == 'Stack([1])' and f'{Stack([1])}' and len(Stack()) == 0",
    "assert 2 in Stack([1, 2]) and 3 not in Stack([1, 2]) and len(Stack()) == 0",
    "s = Stack.of(1, 2)\nassert isinstance(s, Stack) and not isinstance(3, Stack) and len(s) == 2",
    "s = Stack([3])\nt = s\nassert t is s and max(s) == 3 and len(s) == 1",
    "s = Stack()\ns.size = 4\ns.push(7)\nassert s.size == 4 and s.number == 7 and len(s) == 1",
    "assert hasattr(Stack(), 'pop') and not hasattr(Stack(), 'pull') and len(Stack()) == 0",
    "try:\n    full()\n    assert False\nexcept Full as e:\n    assert str(e) == 'no room'\n"
    "assert len(Stack()) == 0",
    "try:\n    full()\n    assert False\nexcept ValueError:\n    pass\nassert len(Stack()) == 0",
    "try:\n    Stack().pop()\n    assert False\nexcept IndexError:\n    assert len(Stack()) == 0",
    "a, b = Stack([1, 2])\nassert (a, b) == (1, 2) and len(Stack()) == 0",
    "from solution import Stack as S\nassert len(S([1])) == 1",
    "import solution\nassert len(solution.Stack([1])) == 1",
    "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
    "        self.assertEqual(len(Stack([1])), 1)\n        self.assertIn(1, Stack([1]))\n"
    "        with self.assertRaises(IndexError): Stack().pop()",
]


@pytest.mark.parametrize("test", ON_A_STACK)
def test_a_class_under_test_is_judged(jail: Jail, test: str) -> None:
    for wrong, verdict in ((0, "pass"), (1, "wrong_answer")):
        request = VerifyRequest(code=STACK.format(wrong=wrong), tests=[AssertTest(code=test)])
        found = jail.verify(request)
        assert found.verdict == verdict, found


F = "def f(x): return {}"
PAIRS = {
    "solution": (
        "class Solution:\n    def f(self, x): return {}", "x * x", "x + x",
        "assert Solution().f(3) == 9\ns = Solution()\nassert s.f(4) == 16",
    ),
    "check of a method": (
        "class Solution:\n    def f(self, x): return {}", "x * x", "x + x",
        "def check(candidate):\n    assert candidate(3) == 9\n    assert candidate(4) == 16\n"
        "check(Solution().f)",
    ),
    "generator": (
        "def f(n):\n    for i in range({}): yield i * i", "n", "n - 1",
        "assert list(f(3)) == [0, 1, 4]\ng = f(2)\nassert next(g) == 0 and next(g) == 1\n"
        "assert next(g, None) is None",
    ),
    "endless generator": (
        "def f(n):\n    while True:\n        yield n\n        n {}= 1", "+", "-",
        "g = f(5)\nassert [next(g) for _ in range(3)] == [5, 6, 7]",
    ),
    "map": (F, "map(str, range(x))", "map(str, range(x + 1))", "assert list(f(2)) == ['0', '1']"),
    "range": (F, "range(x)", "range(x + 1)", "assert f(3) == range(3)"),
    "coroutine": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return {}", "x * x", "x",
        "import asyncio\nassert asyncio.run(f(3)) == 9\n"
        "async def g(): return [await f(2), *await asyncio.gather(f(3), f(4))]\n"
        "assert asyncio.run(g()) == [4, 9, 16]",
    ),
    "lambda as argument": (
        "def f(g, xs): return [{} for x in xs]", "g(x)", "x",
        "assert f(lambda x: x * 2, [1, 2]) == [2, 4]\nassert f(str, [1, 2]) == ['1', '2']",
    ),
    "function that asks again": (
        "def f(g, x): return g(x) {} 1\ndef h(x): return x * 10", "+", "-",
        "assert f(lambda x: h(x), 2) == 21",
    ),
    "function that is returned": (
        "def f(x):\n    return lambda y: x {} y", "+", "-", "assert f(2)(3) == 5"
    ),
    "sorting by a function of the program": (
        F, "-x", "x", "assert sorted([1, 3, 2], key=f) == [3, 2, 1]"
    ),
    "decimal": (
        f"from decimal import Decimal\n{F}", "Decimal(x) / 2", "Decimal(x)",
        "from decimal import Decimal\nassert f(3) == Decimal('1.5')",
    ),
    "decimal in a batch": (f"from decimal import Decimal\n{F}", "Decimal(x) / 2", "x",
        "assert f(3) == 1.5"),
    "fraction": (
        f"from fractions import Fraction\n{F}", "Fraction(x, 2)", "x",
        "from fractions import Fraction\nassert f(3) == Fraction(3, 2)",
    ),
    "date": (
        f"import datetime\n{F}", "datetime.date(2026, 1, x)", "datetime.date(2026, 2, x)",
        "import datetime\nassert f(3) == datetime.date(2026, 1, 3) and f(4).day == 4",
    ),
    "named tuple": (
        f"from collections import namedtuple\nP = namedtuple('P', 'x y')\n{F}", "P(x, 2)",
        "P(2, x)",
        "p = f(3)\nassert p.x == 3 and p == (3, 2) and p[1] == 2\nx, y = p\nassert y == 2",
    ),
    "typed named tuple": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int\n" + F,
        "P(x, 2)", "P(2, x)", "assert f(3) == (3, 2)",
    ),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n" + F, "P(x)", "P(2)",
        "assert f(3) == P(3) and f(3).x == 3",
    ),
    "counter": (
        f"from collections import Counter\n{F}", "Counter(x)", "Counter(x[1:])",
        "from collections import Counter\nassert f('aab') == Counter('aab') == {'a': 2, 'b': 1}\n"
        "assert f('aab')['a'] == 2 and isinstance(f('a'), dict)",
    ),
    "deque": (
        f"from collections import deque\n{F}", "deque(x)", "deque(x[1:])",
        "from collections import deque\nassert f([1, 2]) == deque([1, 2])",
    ),
    "list of objects": (
        "class N:\n    def __init__(self, v): self.v = v\n" + F, "[N(i) for i in range(x)]",
        "[N(0) for i in range(x)]", "assert [n.v for n in f(3)] == [0, 1, 2]",
    ),
    "subclass of a list": (
        "class L(list):\n    def twice(self): return [x * 2 for x in self]\n" + F, "L([x])",
        "L([0])", "assert f(3) == [3] and f(3).twice() == [6] and len(f(3)) == 1 and 3 in f(3)",
    ),
    "enumeration": (
        "from enum import Enum\nclass C(Enum):\n    RED = 1\n    BLUE = 2\n" + F, "C.RED", "C.BLUE",
        "assert f(1) == C.RED and f(1) is C.RED and f(1).value == 1 and f(1).name == 'RED'",
    ),
    "constant": ("LIMIT = {}", "3", "4", "assert LIMIT == 3"),
    "linked list": (
        "class N:\n    def __init__(self, v, n=None): self.v, self.n = v, n\n"
        "def f(h):\n    r = None\n    while h: r, h = N(h.v {}, r), h.n\n    return r",
        "+ 0", "+ 1",
        "h = f(N(1, N(2)))\nassert h.v == 2 and h.n.v == 1 and h.n.n is None",
    ),
    "threads of a test": (
        F, "x * x", "x",
        "import threading\nfound = []\n"
        "ts = [threading.Thread(target=lambda i=i: found.append(f(i))) for i in range(8)]\n"
        "[t.start() for t in ts]\n[t.join() for t in ts]\n"
        "assert sorted(found) == [i * i for i in range(8)]",
    ),
    "iterator as argument": (
        F, "sum(x)", "0", "assert f(iter([1, 2])) == 3 and f({1: 2}.values()) == 2"
    ),
    "deeply nested": (
        "def f(n):\n    r = []\n    for _ in range(n): r = [r]\n    return r", "", "",
        "def depth(x): return 1 + depth(x[0]) if x else 0\nassert depth(f(40)) == 40",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_an_answer_that_is_not_plain_is_judged(jail: Jail, name: str) -> None:
    code, right, wrong, test = PAIRS[name]
    for part in (right, wrong)[: 1 + (right != wrong)]:
        program = code.replace("{}", part)
        request = VerifyRequest(code=program, tests=[AssertTest(code=test)], timeout_s=2)
        found = jail.verify(request)
        assert (found.verdict == "pass") is (part == right), (part, found)
        assert found.verdict in ("pass", "wrong_answer", "runtime_error"), found
