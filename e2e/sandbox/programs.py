"""Hand-made programs for the reward ``code``: tests, program, and whether the program is right."""

from __future__ import annotations

SUM = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 -4\n", "output": "6"}]
LINES = [{"input": "3\n", "output": "1\n2\n3\n"}, {"input": "1\n", "output": "1\n"}]
WORD = [{"input": "abc\n", "output": "cba\n"}, {"input": "größe\n", "output": "eßörg\n"}]
STDIO = [
    (SUM, "a, b = map(int, input().split())\nprint(a + b)", True),
    (SUM, "import sys\nprint(sum(map(int, sys.stdin.read().split())))", True),
    (SUM, "import sys\nsys.stdout.write(str(sum(int(x) for x in sys.stdin.buffer.read().split())))", True),
    (
        SUM,
        "def main():\n    print(sum(map(int, open(0).read().split())))\nif __name__ == '__main__':\n    main()",
        True,
    ),
    (
        SUM,
        "import sys, threading\nthreading.Thread(target=lambda: print(sum(map(int, input().split())))).start()",
        True,
    ),
    (SUM, "print(sum(map(int, input().split())), '  ')\nprint()", True),
    (SUM, "import sys\nprint(sum(map(int, input().split())))\nsys.exit()", True),
    (SUM, "import asyncio\nasync def f(): print(sum(map(int, input().split())))\nasyncio.run(f())", True),
    (
        SUM,
        "from collections import Counter, deque\nimport heapq, bisect, math\nprint(sum(map(int, input().split())))",
        True,
    ),
    (SUM, "a, b = map(int, input().split())\nprint(a - b)", False),
    (SUM, "print(3)", False),
    (SUM, "print(3)\nprint(6)", False),
    (SUM, "", False),
    (SUM, "print(sum(map(int, input().split()))", False),
    (SUM, "print(sum(map(int, input().split())))\n1 / 0", False),
    (SUM, "import sys\nprint(sum(map(int, input().split())))\nsys.exit(1)", False),
    (SUM, "import os\nprint(sum(map(int, input().split())), flush=True)\nos._exit(3)", False),
    (SUM, "print('Result:', sum(map(int, input().split())))", False),
    (SUM, "print(float(sum(map(int, input().split()))))", False),
    (SUM, "print(*range(-100, 100))", False),
    (SUM, "while True:\n    pass", False),
    (SUM, "while True:\n    print(3)", False),
    (SUM, "print(input())", False),
    (LINES, "for i in range(int(input())):\n    print(i + 1)", True),
    (LINES, "print(*range(1, int(input()) + 1), sep='\\n')", True),
    (LINES, "n = int(input())\nprint('\\r\\n'.join(str(i) for i in range(1, n + 1)))", True),
    (LINES, "for i in range(int(input()) - 1):\n    print(i + 1)", False),
    (LINES, "for i in range(int(input()) + 1):\n    print(i + 1)", False),
    (LINES, "print(*range(1, int(input()) + 1))", False),
    (LINES, "print()\nfor i in range(int(input())):\n    print(i + 1)", False),
    (WORD, "print(input()[::-1])", True),
    (WORD, "import sys\nprint(''.join(reversed(sys.stdin.readline().strip())))", True),
    (WORD, "print(input())", False),
    (WORD, "print(input()[::-1].upper())", False),
    (WORD, "print(input().encode()[::-1])", False),
]
"""(tests, program, right)"""

DOUBLE = ["assert double(2) == 4", "assert double(-1) == -2", "assert double(0) == 0"]
SORTED = [
    "x = [3, 1, 2]\nassert ordered(x) == [1, 2, 3]",
    "assert ordered([]) == []",
    "assert ordered((2, 1)) == [1, 2]",
]
ROOT = ["import math\nassert math.isclose(root(2), 2 ** 0.5, rel_tol=1e-6)", "assert abs(root(9) - 3) < 1e-6"]
STACK = ["s = Stack()\ns.push(1)\ns.push(2)\nassert len(s) == 2 and s.pop() == 2 and s.pop() == 1 and len(s) == 0"]
RAISES = ["try:\n    half(3)\nexcept ValueError:\n    pass\nelse:\n    assert False", "assert half(4) == 2"]
APPLY = ["assert apply(lambda x: x + 1, 3) == 5", "assert apply(str.upper, 'a') == 'A'"]
ALLOF = ["assert all(square(i) == i * i for i in range(20))", "assert isinstance(square(2), int)"]
IN_PLACE = [
    "x = [3, 1, 2]\nassert order(x) is None and x == [1, 2, 3]",
    "y = [[2], [1]]\nz = y[0]\norder(y)\nassert y == [[1], [2]]",
]
CHECK = "def check(candidate):\n    assert candidate(1) == 1\n    assert candidate(5) == 120\ncheck(factorial)"
ALWAYS = "class A:\n    def __getattr__(s, n): return lambda *a: True\n    def __eq__(s, o): return True\n"
LIES = (
    "    __sub__ = __rsub__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__\n    __float__ = lambda s: 1.4142\n"
)
QUEUE = (
    "class Stack:\n    def __init__(s): s.a = []\n    def push(s, x): s.a.append(x)\n    __len__ = lambda s: len(s.a)\n"
)
ASSERTS = [
    (DOUBLE, "def double(x):\n    return 2 * x", True),
    (DOUBLE, "double = lambda x: x + x", True),
    (DOUBLE, "class Double:\n    def __call__(self, x):\n        return x * 2\ndouble = Double()", True),
    (DOUBLE, "import functools\n@functools.cache\ndef double(x):\n    print('debug')\n    return x << 1", True),
    (DOUBLE, "def double(x):\n    return x ** 2", False),
    (DOUBLE, "def double(x):\n    return str(2 * x)", False),
    (DOUBLE, "def triple(x):\n    return 3 * x", False),
    (DOUBLE, "def double(x):\n    return None", False),
    (DOUBLE, "def double(x)\n    return 2 * x", False),
    (DOUBLE, "import sys\nsys.exit(0)", False),
    (DOUBLE, "def double(x):\n    raise SystemExit(0)", False),
    (DOUBLE, "def double(x):\n    while True: pass", False),
    (DOUBLE, ALWAYS + "def double(x): return A()", False),
    (SORTED, "def ordered(x):\n    return sorted(x)", True),
    (SORTED, "def ordered(x):\n    y = list(x)\n    y.sort()\n    return y", True),
    (SORTED, "def ordered(x):\n    return x", False),
    (SORTED, "def ordered(x):\n    return sorted(x, reverse=True)", False),
    (SORTED, "def ordered(x):\n    return tuple(sorted(x))", False),
    (ROOT, "def root(x):\n    return x ** 0.5", True),
    (ROOT, "import math\nroot = math.sqrt", True),
    (ROOT, "def root(x):\n    return x / 2", False),
    (ROOT, ALWAYS + LIES + "def root(x): return A()", False),
    (ROOT, "import math\nmath.isclose = lambda *a, **b: True\nabs = lambda x: 0\ndef root(x): return 1", False),
    (STACK, "class Stack(list):\n    def push(self, x):\n        self.append(x)", False),
    (STACK, QUEUE + "    def pop(s): return s.a.pop()", True),
    (STACK, QUEUE + "    def pop(s): return s.a.pop(0)", False),
    (RAISES, "def half(x):\n    if x % 2: raise ValueError('odd')\n    return x // 2", True),
    (RAISES, "class Odd(ValueError): pass\ndef half(x):\n    if x % 2: raise Odd(x)\n    return x // 2", True),
    (RAISES, "def half(x):\n    if x % 2: raise TypeError('odd')\n    return x // 2", False),
    (RAISES, "def half(x):\n    return x // 2", False),
    (APPLY, "def apply(f, x):\n    return f(x) if isinstance(x, str) else f(x) + 1", True),
    (APPLY, "def apply(f, x):\n    return f(x)", False),
    (ALLOF, "def square(x):\n    return x * x", True),
    (ALLOF, "all = lambda x: True\nisinstance = lambda *a: True\ndef square(x):\n    return 0.5", False),
    (IN_PLACE, "def order(x):\n    x.sort()", True),
    (IN_PLACE, "def order(x):\n    x = sorted(x)", False),
    (CHECK, "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)", True),
    (CHECK, "def factorial(n):\n    return n", False),
    (CHECK, "def check(candidate): pass\ndef factorial(n): return n", False),
]  # fmt: skip
"""(tests, program, right)"""

FIZZ = """
import pytest
from solution import fizz

@pytest.mark.parametrize("n, expected", [(1, "1"), (3, "Fizz"), (5, "Buzz"), (15, "FizzBuzz")])
def test_values(n, expected):
    assert fizz(n) == expected

def test_negative():
    with pytest.raises(ValueError, match="negative"):
        fizz(-1)
"""
ACCOUNT = """
import pytest
import solution

@pytest.fixture
def account():
    return solution.Account(10)

class TestAccount:
    def test_balance(self, account):
        assert account.balance == 10

    def test_withdraw(self, account):
        account.withdraw(4)
        assert account.balance == 6

    def test_too_much(self, account):
        with pytest.raises(solution.TooMuchError):
            account.withdraw(11)
        assert account.balance == 10
"""
MEAN = """
from pytest import approx
from solution import *

def test_mean(): assert mean([1, 2, 4]) == approx(7 / 3)
def test_kind(): assert type(mean([1, 2])) is float
def test_file(tmp_path):
    (tmp_path / "x").write_text("1")
    assert mean([int((tmp_path / "x").read_text())]) == 1
"""
GOOD_FIZZ = """def fizz(n):
    if n < 0:
        raise ValueError("negative")
    return ("Fizz" if n % 3 == 0 else "") + ("Buzz" if n % 5 == 0 else "") or str(n)
"""
GOOD_ACCOUNT = """class TooMuchError(Exception):
    pass
class Account:
    def __init__(self, balance): self.balance = balance
    def withdraw(self, amount):
        if amount > self.balance: raise TooMuchError(amount)
        self.balance -= amount
"""
FAKES = [
    "import os\nos._exit(0)",
    "import sys\nsys.exit(0)",
    "import os\n{good}\nos._exit(0)",
    "import pytest\npytest.skip('all', allow_module_level=True)",
    "import pytest\ndef fizz(n): pytest.skip('all')\nmean = fizz\nAccount = TooMuchError = fizz",
    "import pytest\ndef fizz(n): pytest.xfail('all')\nmean = fizz\nAccount = TooMuchError = fizz",
    "import atexit, os\natexit.register(lambda: os._exit(0))",
    "import _pytest.reports as r\nr.TestReport.outcome = 'passed'\nr.TestReport.failed = False\n"
    "def fizz(n): return 0\nmean = Account = TooMuchError = fizz",
    "def test_mine(): pass\ntest_a = test_b = test_mine\n__all__ = ['test_a', 'test_b', 'test_mine']",
    "import os\nos.write(1, b'[5, 5]')\nos._exit(0)",
    "import os, struct, json\nfor fd in range(10):\n  try:\n"
    "    d = json.dumps({{'answer': True}}).encode()\n    os.write(fd, struct.pack('!I', len(d)) + d)\n"
    "  except OSError: pass",
    ALWAYS.replace("{", "{{").replace("}", "}}") + "fizz = mean = Account = TooMuchError = A()",
]  # fmt: skip
PYTEST = [
    (FIZZ, GOOD_FIZZ, True),
    (FIZZ, GOOD_FIZZ.replace("def fizz", "import math\ndef fizz"), True),
    (FIZZ, "class NegativeError(ValueError): pass\n" + GOOD_FIZZ.replace("ValueError(", "NegativeError("), True),
    (FIZZ, "print('loading')\n" + GOOD_FIZZ, True),
    (FIZZ, GOOD_FIZZ.replace("n % 3", "n % 4"), False),
    (FIZZ, GOOD_FIZZ.replace("negative", "below zero"), False),
    (FIZZ, GOOD_FIZZ.replace("ValueError", "KeyError"), False),
    (FIZZ, GOOD_FIZZ.replace("or str(n)", "or n"), False),
    (FIZZ, "def buzz(n): pass", False),
    (FIZZ, "def fizz(n)", False),
    (ACCOUNT, GOOD_ACCOUNT, True),
    (ACCOUNT, GOOD_ACCOUNT + "print(Account(3).balance)", True),
    (ACCOUNT, GOOD_ACCOUNT.replace("raise TooMuchError(amount)", "return"), False),
    (ACCOUNT, GOOD_ACCOUNT.replace("raise TooMuchError", "raise ValueError"), False),
    (ACCOUNT, GOOD_ACCOUNT.replace("-=", "+="), False),
    (ACCOUNT, GOOD_ACCOUNT.replace("> self.balance", ">= self.balance + 2"), False),
    (MEAN, "def mean(x):\n    return sum(x) / len(x)", True),
    (MEAN, "from statistics import fmean as mean", True),
    (MEAN, "def mean(x):\n    return sum(x) // len(x)", False),
    (MEAN, "def mean(x):\n    return sorted(x)[len(x) // 2]", False),
    *((FIZZ, fake.format(good=""), False) for fake in FAKES),
    *((ACCOUNT, fake.format(good=""), False) for fake in FAKES[:4]),
]
"""(file of tests, program, right)"""
