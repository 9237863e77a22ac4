"""Attacks on other processes, memory and time."""

from __future__ import annotations

import signal

from e2e.sandbox.attack import QUICK, attack, dies, ended, prints, refused

PROCESSES = [
    attack(
        "fork bomb",
        "for _ in range(100): attempt(os.fork)",
        refused(100),
    ),
    attack(
        "execute another program",
        'attempt(lambda: os.execv("/bin/sh", ["sh"]))\n'
        'attempt(lambda: os.posix_spawn("/bin/sh", ["sh"], {}))\n'
        'attempt(lambda: subprocess.run(["/bin/sh"]))\n'
        "calls((58,), (56, 17, 0, 0, 0, 0), (435, bytes(88), 88), (322, -100, b'/bin/sh', "
        "None, None, 0))",
        refused(7),
    ),
    attack(
        "thread bomb",
        "threading.stack_size(32768)\n"
        "wait = threading.Event()\n"
        "try:\n"
        "  while True: threading.Thread(target=wait.wait, daemon=True).start()\n"
        "except BaseException: wait.wait()",
        ended("threads"),
    ),
    attack(
        "new namespaces, sessions and users",
        "calls((272, 0x10000000), (272, 0x20000), (308, 0, 0), (56, 0x10000000 | 17, 0, 0, 0, "
        "0), (126, 0, 0))\n"
        "for action in (os.setsid, lambda: os.setpgid(0, 0), lambda: os.setuid(0), lambda: "
        "os.setgid(0),\n"
        "               lambda: os.setgroups([0])): attempt(action)",
        refused(10),
    ),
    attack(
        "mounts and roots",
        "calls((165,0,0,0,0,0), (166,0,0), (155,0,0), (161,b'/'), (428,0,0,0), (442,0,0,0))",
        refused(6),
    ),
    attack(
        "trace processes",
        "calls((101, 0, 0, 0, 0), (101, 16, V, 0, 0), (101, 0x4206, P, 0, 0))",
        refused(3),
    ),
    attack(
        "memory and descriptors of other processes",
        "calls((310, V, 0, 0, 0, 0, 0), (311, V, 0, 0, 0, 0, 0), (434, V, 0), (438, 3, 1, 0), "
        "(312, V, P, 0, 0, 0), (440, 0, 0, 0, 0, 0))",
        refused(6),
    ),
    attack(
        "signals to other processes",
        "for pid in (V, P, -1, 0, 1): attempt(lambda: os.kill(pid, signal.SIGKILL))\n"
        "calls((234, V, V, 9), (200, V, 9), (129, V, 9, bytes(128)), (297, V, V, 9, "
        "bytes(128)), (424, 3, 9, 0, 0))",
        refused(10),
    ),
    attack(
        "signals by the owner of a descriptor",
        "import fcntl\n"
        "r, w = os.pipe()\n"
        "for command in (8, 10, 15): attempt(lambda: fcntl.fcntl(r, command, struct.pack('ii', "
        "1, V) if command == 15 else V))\n"
        "for command in (0x5452, 0x8901, 0x8902): attempt(lambda: fcntl.ioctl(r, command, "
        "struct.pack('i', V)))",
        refused(6),
    ),
    attack(
        "limits and priorities of other processes",
        "attempt(lambda: resource.prlimit(V, resource.RLIMIT_AS, (1, 1)))\n"
        "attempt(lambda: os.setpriority(os.PRIO_PROCESS, V, 19))\n"
        "attempt(lambda: os.setpriority(os.PRIO_USER, 0, 19))\n"
        "attempt(lambda: os.sched_setaffinity(V, {0}))\n"
        "calls((251, 1, V, 0), (144, V, 3, bytes(8)), (314, V, bytes(64), 0))",
        refused(7),
    ),
    attack(
        "descriptors of the service",
        "found = []\n"
        "for n in range(1024):\n"
        "  try: os.fstat(n)\n"
        "  except OSError: continue\n"
        "  found.append(n)\n"
        "print(found)",
        prints("[0, 1, 2]"),
    ),
]

MEMORY = [
    attack(
        "one large block",
        "attempt(lambda: bytearray(4 << 30))",
        prints("MemoryError"),
    ),
    attack(
        "many blocks",
        "attempt(lambda: [bytearray(16 << 20) for _ in range(1000)])",
        prints("MemoryError"),
    ),
    attack(
        "shared mapping",
        "attempt(lambda: mmap.mmap(-1, 4 << 30))",
        prints("ENOMEM"),
    ),
    attack(
        "files in memory",
        "attempt(lambda: os.memfd_create('x'))\ncalls((447, 0))",
        refused(2),
    ),
    attack(
        "memory between processes",
        "calls((29, 1, 1 << 20, 0o1777), (64, 1, 1, 0o1777), (68, 1, 0o1777), (240, b'q', 66, 0o666, 0))",
        refused(4),
    ),
    attack(
        "pipes",
        "import fcntl\n"
        "pipes = []\n"
        "attempt(lambda: fcntl.fcntl(os.pipe()[0], 1031, 1 << 20))\n"
        "def fill():\n"
        "  while True: pipes.append(os.pipe())\n"
        "attempt(fill)",
        prints("EPERM", "EMFILE"),
    ),
    attack(
        "descriptors",
        "kept = []\nattempt(lambda: [kept.append(open('/dev/null')) for _ in range(1000)])",
        prints("EMFILE"),
    ),
    attack(
        "higher limits",
        "for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, "
        "resource.RLIMIT_CORE):\n"
        "  attempt(lambda: resource.setrlimit(kind, (1 << 40, 1 << 40)))",
        prints(*["ValueError"] * 4),
    ),
    attack(
        "change the input",
        "attempt(lambda: os.ftruncate(0, 0))\nattempt(lambda: os.write(0, b'x'))",
        refused(2, "EFBIG"),
    ),
]

TIME = [
    attack(
        "sleep",
        "time.sleep(100)",
        ended("time"),
        **QUICK,
    ),
    attack(
        "busy loop",
        "while True: pass",
        dies(signal.SIGKILL),
        seconds=1,
        wall_seconds=20,
    ),
    attack(
        "catch everything",
        "while True:\n  try:\n    while True: time.sleep(1)\n  except BaseException: pass",
        ended("time"),
        **QUICK,
    ),
    attack(
        "block and ignore signals",
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
        "for n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(100)",
        ended("time"),
        **QUICK,
    ),
    attack(
        "stop itself",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        ended("time"),
        **QUICK,
    ),
    attack(
        "one instruction that does not end",
        "10**10**9",
        ended("time"),
        **QUICK,
    ),
    attack(
        "regular expression that does not end",
        "import re\nre.match('(a+)+b', 'a' * 60)",
        ended("time"),
        **QUICK,
    ),
    attack(
        "close the output and go on",
        "os.close(1); os.close(2)\ntime.sleep(100)",
        ended("time"),
        **QUICK,
    ),
    attack(
        "threads that do not end",
        "threading.Thread(target=time.sleep, args=(100,)).start()",
        ended("time"),
        **QUICK,
    ),
    attack(
        "endless output",
        "while True: os.write(1, b'x' * 65536)",
        ended("output"),
    ),
    attack(
        "output that never fits a line",
        "sys.stdout.write('x' * (1 << 22))",
        ended("output"),
    ),
    attack(
        "endless recursion",
        "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        lambda output, status, why: "" if status and (not output) else output,
        **QUICK,
    ),
    attack(
        "segmentation fault",
        "ctypes.string_at(0)",
        dies(signal.SIGSEGV),
    ),
    attack(
        "abort",
        "os.abort()",
        dies(signal.SIGABRT),
    ),
    attack(
        "output at exit and in threads",
        "import atexit\n"
        "atexit.register(lambda: print('exit'))\n"
        "printed = threading.Event()\n"
        "threading.Thread(target=lambda: (printed.wait(), time.sleep(0.05), print('thread'))).start()\n"
        "print('main')\n"
        "printed.set()",
        prints("main", "thread", "exit"),
    ),
]
