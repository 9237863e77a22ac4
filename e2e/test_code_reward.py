"""The verdicts of the reward ``code`` on hand-made programs, and on programs that fake a verdict."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from e2e.sandbox.programs import ALLOF, ASSERTS, DOUBLE, FIZZ, GOOD_FIZZ, LINES, PYTEST, STDIO, SUM
from rljob.api.rewards import REWARDS
from rljob.rewards.code_reward import CodeReward

ADD = "print(sum(map(int, input().split())))"
ONE_OR_FIVE = "return {1: '1', 5: 'Buzz'}.get(n)"
CASES = {"stdio": STDIO, "asserts": ASSERTS, "pytest": PYTEST}


def reward_of(style: str, **config: object) -> CodeReward:
    return CodeReward(REWARDS["code"].parse({"style": style, "seconds": 30} | config), [])


@pytest.fixture(scope="module")
def rewards() -> Iterator[dict[str, CodeReward]]:
    made = {style: reward_of(style) for style in CASES}
    made |= {f"{style} quick": reward_of(style, seconds=1) for style in CASES}  # for programs that never end
    made |= {f"{style} partial": reward_of(style, credit="partial") for style in CASES}
    yield made
    for reward in made.values():
        reward.close()


def score(reward: CodeReward, tests: object, program: str) -> float:
    return reward(completion=f"I think:\n```python\n{program}\n```\n", problem={"tests": tests})[0]


@pytest.mark.parametrize("style", CASES)
def test_there_are_thirty_programs_of_each_style_right_and_wrong(style):
    right = [program for _, program, is_right in CASES[style] if is_right]
    assert len(CASES[style]) >= 30 and 5 <= len(right) <= len(CASES[style]) - 10


@pytest.mark.parametrize(("style", "i"), [(style, i) for style, cases in CASES.items() for i in range(len(cases))])
def test_a_right_program_gets_1_and_a_wrong_one_0(rewards, style, i):
    tests, program, right = CASES[style][i]
    assert score(rewards[style if right else f"{style} quick"], tests, program) == float(right), program


@pytest.mark.parametrize(
    ("style", "tests", "program", "share"),
    [
        ("stdio", SUM, "a, b = map(int, input().split())\nprint(abs(a) + abs(b))", 1 / 2),
        ("stdio", LINES, "print(1)", 1 / 2),
        ("stdio", json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]}), ADD, 1 / 2),
        ("asserts", DOUBLE, "def double(x):\n    return x ** 2", 2 / 3),
        ("asserts", json.dumps(DOUBLE), "def double(x):\n    return x ** 2", 2 / 3),
        ("asserts", ALLOF, "def square(x):\n    return float(x * x)", 1 / 2),
        ("asserts", DOUBLE, "def double(x):\n    if x == 2: import os; os._exit(0)\n    return 2 * x", 2 / 3),
        ("pytest", FIZZ, GOOD_FIZZ.replace("negative", "low"), 4 / 5),
        ("pytest", FIZZ, f"import pytest\ndef fizz(n):\n    if n == 3: pytest.skip()\n    {ONE_OR_FIVE}", 2 / 5),
    ],
)  # fmt: skip
def test_partial_credit_is_the_share_of_tests_that_pass(rewards, style, tests, program, share):
    assert score(rewards[f"{style} partial"], tests, program) == pytest.approx(share)


FINDERS = {
    "frames": "import sys\nf = sys._getframe()\nwhile f: found.append(repr(f.f_locals)); f = f.f_back",
    "objects": "import gc\nfound += [repr(o) for o in gc.get_objects() if isinstance(o, (str, bytes, dict, list))]",
    "modules": "import sys\nfor m in list(sys.modules.values()): found.append(repr(getattr(m, '__dict__', '')))",
    "files": (
        "import os\nfor place in ('.', '..', '/tmp', '/dev/shm', '/proc/self/fd', f'/proc/{os.getppid()}/fd'):\n"
        "  try: found += [open(os.path.join(place, n)).read() for n in os.listdir(place)]\n  except OSError: pass"
    ),
    "descriptors": (
        "import os\nfor n in (0, 1, 2, 3, *range(5, 64)):\n"
        "  for read in (lambda: os.pread(n, 9999, 0), lambda: os.read(n, 9999)):\n"
        "    try: found.append(repr(read()))\n    except OSError: pass"
    ),
    "memory": (
        "import os\nfor pid in ('self', os.getppid()):\n  try: found.append(open(f'/proc/{pid}/mem', 'rb').read())\n"
        "  except OSError: pass"
    ),
}
"""Ways to look for the expected output: name → program that appends texts to ``found``."""


@pytest.mark.parametrize("name", FINDERS)
def test_a_program_cannot_find_the_expected_output(rewards, name):
    secret = "expected-730419"
    look = f"found = []\n{FINDERS[name]}\nimport re\nhit = re.search('expected-7[0-9]+', ' '.join(map(str, found)))\n"
    assert score(rewards["stdio"], [{"input": "", "output": secret}], f"{look}print(hit and hit[0])") == 0
    body = look.replace("\n", "\n    ")
    program = f"def f():\n    {body}\n    return hit and hit[0]"
    assert score(rewards["asserts"], [f"assert f() == {secret!r}"], program) == 0
    tests = f"from solution import f\ndef test_f(): assert f() == {secret!r}"
    assert score(rewards["pytest"], tests, program) == 0


def test_an_answer_of_an_earlier_run_is_gone(rewards):
    keep = "import builtins, math\nmath.kept = builtins.kept = [3]\nprint(sum(map(int, input().split())))"
    assert score(rewards["stdio"], SUM, keep) == 1
    assert score(rewards["stdio"], SUM[:1], "import math\nprint(math.kept[0])") == 0
    assert score(rewards["stdio"], SUM[:1], "print(kept[0])") == 0


def test_a_completion_without_a_program_gets_0_and_is_counted(rewards):
    for completion in ("", "3", "```python\nprint(3)", "```json\n3\n```", "```python\nprint(3)\n```</think> none"):
        assert rewards["stdio"](completion=completion, problem={"tests": SUM}) == (0.0, {"answered": 0.0})


@pytest.mark.parametrize(
    "completion",
    [
        "```\n{0}\n```", "~~~py\n{0}\n~~~", "```Python3 title=x\n{0}\n```", "````python\n{0}\n````",
        "```python\n1/0\n```\nBetter:\n```python\n{0}\n```", "```python\n{0}\n```\nOutput:\n```text\n3\n```",
        "<think>```python\n1/0\n```</think>```python\n1/0\n```\n```python\n{0}\n```",
        "```python\n{0}\n```\n```python\n1/0",
    ],
)  # fmt: skip
def test_the_program_is_the_last_closed_block(rewards, completion):
    program = ADD
    assert rewards["stdio"](completion=completion.format(program), problem={"tests": SUM}) == (1.0, {"answered": 1.0})


def test_the_whole_completion_can_be_the_program():
    reward = reward_of("stdio", extract="whole")
    assert reward(completion=ADD, problem={"tests": SUM})[0] == 1
    reward.close()


def test_a_program_writes_files_only_where_the_manifest_allows_it():
    program = "import tempfile\nwith tempfile.TemporaryFile('w+') as f:\n  f.write(input()); f.seek(0); print(f.read())"
    tests = [{"input": "3", "output": "3"}]
    for mebibytes, right in ((0, 0), (1, 1)):
        reward = reward_of("stdio", filesMebibytes=mebibytes)
        assert score(reward, tests, program) == right
        reward.close()


BUSY = "while time.process_time() < 0.1: pass"


@pytest.mark.parametrize("spend", [BUSY, "time.sleep(1)"])
def test_tests_after_the_time_of_a_sample_have_failed(spend):
    """Else a program could sleep until the sample is not scored, which is better than a score of 0."""
    reward = reward_of("stdio", credit="partial", sampleSeconds=0.05)
    tests = [{"input": f"{n}", "output": f"{n}"} for n in range(4)]
    assert score(reward, tests, f"import time\nn = input()\n{spend}\nprint(n)") == 1 / 4
    reward.close()


def test_the_time_of_the_program_counts_when_other_code_calls_it():
    reward = reward_of("asserts", credit="partial", sampleSeconds=0.05)
    program = f"import time\ndef same(n):\n    {BUSY}\n    return n"
    assert score(reward, [f"assert same({n}) == {n}" for n in range(4)], program) == 1 / 4
    reward.close()


def test_a_layer_that_is_missing_ends_the_start_with_its_name(monkeypatch):
    monkeypatch.setenv("PATH", "")
    reward_of("stdio").close()
    with pytest.raises(
        ValueError, match=r"config.layers demands bubblewrap, which is missing here: there is no program"
    ):
        reward_of("stdio", layers=["bubblewrap"])


def test_the_layers_are_in_the_log(caplog):
    with caplog.at_level("INFO"):
        reward_of("stdio").close()
    assert "code runs behind" in caplog.text and "weakest: seccomp" in caplog.text


INJECTED = """
import sys
frame = sys._getframe()
while 'peer' not in frame.f_locals:
    frame = frame.f_back
peer = frame.f_locals['peer']
old = peer._do
def f(*_):
    return 0
def do(operation, *values):
    answer = old(operation, *values)
    if operation == 'names':
        same = [[name, peer._encode(lambda *_: 1)] for name in ('sorted', 'len', 'abs', 'all')]
        answer += [['__builtins__', ['d', same]], *same]
    return answer
peer._do = do
"""


@pytest.mark.parametrize(
    "test", ["assert sorted(f(2)) == sorted([1, 2, 3])", "assert abs(f(2) - 5) < 1", "assert all([f(2) == 5])"]
)
def test_a_program_cannot_replace_the_builtins_of_the_tests(rewards, test):
    assert score(rewards["asserts"], [test], INJECTED) == 0.0
    assert score(rewards["asserts"], ["assert f(2) == 0"], INJECTED) == 1.0


@pytest.mark.parametrize(
    "test", ["assert 4 in f(2)", "assert all(a == b for a, b in zip(map(f, [1, 2]), [3, 4]))"], ids=["in", "zip"]
)
def test_a_program_does_not_decide_what_the_tests_compare(rewards, test):
    liar = "class All:\n    def __contains__(self, x): return True\n    def __iter__(self): return iter([])\n"
    assert score(rewards["asserts"], [test], f"{liar}def f(x):\n    return All()") == 0.0
    assert score(rewards["asserts"], [test], "def f(x):\n    raise StopIteration") == 0.0
    assert score(rewards["asserts"], ["assert 4 in f(2)"], "def f(x):\n    return [x, x + 2]") == 1.0


SORTS = "def f(x, again=None):\n    x.sort()\n"
RAISES = f"{SORTS}    raise ValueError"
COUNTS = "def f(a, b):\n    a.append(1)\n    return len(b)"
HALF = "from fractions import Fraction\ndef f(x): return x + Fraction(1, 2)"
TURN = "from collections import deque\nd = deque([1, 2], 5)\nf(d)\nassert d == deque([2, 1], 5)"
DATES = "datetime.date(1, 1, 1), datetime.datetime(2024, 2, 29, 12), datetime.time(1, 2), datetime.timedelta(1.5)"


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (SORTS, "d = [3, 1, 2]\nf(d)\nassert d == [1, 2, 3]"),
        (SORTS, "d = [3, 1, 2]\nf(x=d)\nassert d == [1, 2, 3]"),
        (RAISES, "d = [2, 1]\ntry: f(again=0, x=d)\nexcept ValueError: pass\nassert d == [1, 2]"),
        (f"{SORTS}    return x", "d = [3, 1, 2]\nassert f(d) is d and f(x=d) is d and f(d) == [1, 2, 3]"),
        (f"{SORTS}    return x", "d = [3, 1, 2]\nassert f(d.copy()) == [1, 2, 3] and d == [3, 1, 2]"),
        (COUNTS, "d = []\nassert f(d, d) == 1 and f(d, b=d) == 2 and d == [1, 1]"),
        (COUNTS, "assert f([], []) == 0"),
        (
            "def f(c): c['z'] = 1; return c",
            "from collections import Counter\nassert f(Counter('a')) == {'a': 1, 'z': 1}",
        ),
        ("def f(t): t[0].append(3); return t", "assert f(([], 1)) == ([3], 1)"),
        ("def f(q): q.rotate(1)\n", TURN),
        ("def f(x): return sum(x)", "assert f(range(5)) == 10 and f(x=range(4, 0, -2)) == 6"),
        ("def f(x): return range(x)", "assert f(3) == range(3) and f(0) == range(0)"),
        ("class f:\n    def __init__(self): self.me = self", "a, b = f(), f()\nassert a.me is a and a.me is not b"),
        (HALF, "assert f(Fraction(1, 3)) == Fraction(5, 6)"),
        ("def f(x): return 2 * x", "from decimal import Decimal\nassert str(f(Decimal('1.50'))) == '3.00'"),
        ("def f(x): return x", f"import datetime\nfor x in {DATES}: assert f(x) == x"),
    ],
)
def test_values_cross_between_tests_and_program(rewards: dict[str, CodeReward], program: str, test: str) -> None:
    assert score(rewards["asserts"], [test], program) == 1.0
    assert score(rewards["asserts"], [test], "def f(*_, **__): return None") == 0.0


ERROR = """class Wrong(ValueError):
    def __init__(self, code): self.code, self.where = code, {'line': code}
    def __str__(self): return f'code {self.code}'
def f(x): raise Wrong(x)
"""
OBJECT = """class Base: pass
class f(Base):
    def __init__(self, x): self.x = x
"""


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (
            ERROR,
            "try: f(7)\nexcept Wrong as e: assert (e.code, e.where, str(e)) == (7, {'line': 7}, 'code 7')\nelse: 1 / 0",
        ),
        ("def f(x): return int(x)", "try: f('a')\nexcept ValueError as e: assert \"'a'\" in str(e)\nelse: 1 / 0"),
        (OBJECT, "assert vars(f(3)) == {'x': 3} and issubclass(f, Base) and not issubclass(Base, f)"),
        (OBJECT, "a = f(3)\ndel a.x\nassert not hasattr(a, 'x') and vars(a) == {}"),
        (
            "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(x): return P(x, [P(1, 2)])",
            "p = f(3)\nassert p.x == 3 and p.y[0].y == 2 and p == (3, [(1, 2)]) and p._asdict()['x'] == 3",
        ),
        ("def f(x): return x.fold", "import datetime\nassert f(datetime.datetime(2024, 10, 27, 2, fold=1)) == 1"),
        ("def f(g): return g(1, b=2)", "assert f(lambda a, *, b: (a, b)) == (1, 2)"),
        (
            "g = None\ndef f(h):\n    global g\n    g, old = h, g\n    return g is old",
            "def h(): pass\nassert f(h) in (0, 1) and f(h)",
        ),
        (
            "def f(g):\n    try: g()\n    except KeyError as e: return e.args",
            "def g(): raise KeyError('a')\nassert f(g) == ('a',)",
        ),
        ("def f(kind, x): return isinstance(x, kind)", "assert f(int, 3) and not f(str, 3) and f((int, str), '')"),
        ("def f(kind):\n    try: [][0]\n    except kind: return 5", "assert f(IndexError) == 5"),
        (
            "import threading\nn, lock = 0, threading.Lock()\n"
            "def f():\n    global n\n    with lock: n += 1\ndef count(): return n",
            "import threading\nts = [threading.Thread(target=lambda: [f() for _ in range(30)]) for _ in range(4)]\n"
            "for t in ts: t.start()\nfor t in ts: t.join()\nassert count() == 120",
        ),
        (
            "import threading\ndef f(g):\n    ts = [threading.Thread(target=g, args=(i,)) for i in range(9)]\n"
            "    for t in ts: t.start()\n    for t in ts: t.join()",
            "got = []\nf(got.append)\nassert sorted(got) == list(range(9))",
        ),
    ],
)
def test_objects_exceptions_and_functions_cross(rewards: dict[str, CodeReward], program: str, test: str) -> None:
    assert score(rewards["asserts"], [test], program) == 1.0
    nothing = "class Wrong(Exception): pass\nclass Base: pass\ndef count(): return 0\ndef f(*_, **__): return None"
    assert score(rewards["asserts"], [test], nothing) == 0.0


STOPS = "class Box:\n    def __init__(self, x): pass\n" + "".join(
    f"    def {name}: raise StopIteration\n"
    for name in ("__getattr__(self, n)", "__getitem__(self, k)", "__len__(self)", "__str__(self)", "__bool__(self)")
)


@pytest.mark.parametrize("asked", ["Box(x).value", "Box(x)[0]", "len(Box(x))", "str(Box(x))", "bool(Box(x))"])
def test_a_stop_iteration_of_an_object_ends_no_loop_of_the_tests(rewards: dict[str, CodeReward], asked: str) -> None:
    test = f"assert all(map(lambda x: {asked} == x, range(5)))"
    assert score(rewards["asserts"], [test], STOPS) == 0.0


FORGED = """
import sys
frame = sys._getframe()
while 'peer' not in frame.f_locals:
    frame = frame.f_back
peer = frame.f_locals['peer']
def f(x): pass
old = peer._do
peer._do = lambda operation, *values: STOP() if operation == 'call' else old(operation, *values)
def STOP(): raise StopIteration
"""


def test_a_forged_answer_to_a_call_ends_no_loop_of_the_tests(rewards: dict[str, CodeReward]) -> None:
    assert score(rewards["asserts"], ["assert all(a == b for a, b in zip(map(f, [1, 2]), [3, 4]))"], FORGED) == 0.0


def test_an_iterator_of_the_program_may_still_end(rewards: dict[str, CodeReward]) -> None:
    tests = ["assert list(f()) == [1]", "assert [x for x in f()] == [1]", "it = f()\nnext(it)\nassert next(it, 2) == 2"]
    assert score(rewards["asserts"], tests, "def f():\n    yield 1") == 1.0


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)", "sys.exit()"])
def test_a_program_may_end_itself(rewards, end):
    assert score(rewards["stdio"], SUM, f"import sys\n{ADD}\n{end}") == 1.0
    assert score(rewards["stdio"], SUM, f"{ADD}\nexit(1)") == 0.0


def test_a_star_import_of_the_program_keeps_the_names_of_the_tests(rewards):
    half = "import math\ndef half(x):\n    return math.floor(x / 2)"
    tests = "from solution import *\ndef test_half():\n    assert math.isclose(half(4), 2)"
    assert score(rewards["pytest"], tests, half) == 1.0
    assert score(rewards["pytest"], f"import math\n{tests}", half) == 1.0
    liar = "def half(x): return 7\ndef approx(x): return 7"
    tests = "from pytest import approx\nfrom solution import *\ndef test_half():\n    assert half(5) == approx(2.5)"
    assert score(rewards["pytest"], tests, liar) == 0.0
