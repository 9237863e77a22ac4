"""Attacks on files, the network and the kernel."""

from __future__ import annotations

import signal

from e2e.sandbox.attack import FILES, PRELUDE, QUICK, Attack, anyhow, attack, dies, ended, prints, refused

DISK = [
    attack(
        "write where it may not",
        "import string\n"
        "for place in ('.', '/', '/tmp', '/dev/shm', '/var/tmp', "
        "os.path.dirname(string.__file__), os.path.dirname(T['file'])):\n"
        "  attempt(lambda: open(place + '/mark', 'w'))\n"
        "  attempt(lambda: os.mkdir(place + '/marks'))",
        refused(14, "EROFS"),
    ),
    attack(
        "a large file",
        "f = open('x', 'wb')\n"
        "attempt(lambda: os.write(f.fileno(), bytes(1 << 20)) and os.write(f.fileno(), b'x'))\n"
        "attempt(lambda: os.ftruncate(f.fileno(), 1 << 40))\n"
        "attempt(lambda: os.posix_fallocate(f.fileno(), 0, 1 << 40))",
        lambda output, status, why: (
            "" if output in ("EFBIG\n" * 3, "ENOSPC\nEFBIG\nEFBIG\n") else f"{output} {status} {why}"
        ),
        **FILES,
    ),
    attack(
        "many files",
        "for n in range(10**6):\n  try: open(f'{n}', 'wb').write(bytes(65536))\n  except OSError: time.sleep(0.1)",
        ended("files", "time"),
        **FILES,
        **QUICK,
    ),
    attack(
        "many empty files",
        "for n in range(10**6): os.close(os.open(f'{n}', os.O_CREAT))",
        ended("files"),
        **FILES,
    ),
    attack(
        "removed files that stay open",
        "kept = []\n"
        "for n in range(50):\n"
        "  kept.append(open('x', 'wb', 0)); os.unlink('x')\n"
        "  try: kept[-1].write(bytes(1 << 19))\n"
        "  except OSError: pass\n"
        "time.sleep(10)",
        ended("files", "time"),
        **FILES,
        **QUICK,
    ),
    attack(
        "deep directories",
        "for n in range(3000): os.mkdir('d'); os.chdir('d')",
        anyhow,
        **FILES,
    ),
    attack(
        "closed directories",
        "os.mkdir('a'); open('a/f', 'w').close(); os.mkdir('a/b', 0); os.mkdir('c', 0o300); "
        "open('c/f', 'w').close()\n"
        "os.symlink('/', 's')",
        anyhow,
        **FILES,
    ),
    Attack(
        "files for the next run",
        (
            f"{PRELUDE}import builtins\nbuiltins.mark = 1\nopen('mark', 'w').write('x')",
            f"{PRELUDE}import builtins\nprint(os.listdir('.'), hasattr(builtins, 'mark'))",
        ),
        prints("[] False"),
        FILES,
    ),
    attack(
        "links to a file of the victim",
        "os.symlink(T['file'], 'l')\n"
        "read('l')\n"
        "attempt(lambda: os.link(T['file'], 'h'))\n"
        "attempt(lambda: os.rename(T['file'], 'r'))\n"
        "attempt(lambda: os.rename('l', T['file']))",
        refused(4, "EXDEV"),
        **FILES,
    ),
    attack(
        "device and pipe files",
        "attempt(lambda: os.mknod('n'))\nattempt(lambda: os.mkfifo('p'))",
        refused(2),
        **FILES,
    ),
]

VIEW = [
    attack(
        "files of the machine",
        "read('/etc/passwd', '/etc/shadow', '/etc/hostname', T['file'], '/proc/version', "
        "'/proc/self/maps', '/root/.bashrc', '/var/log/dpkg.log')",
        refused(8),
    ),
    attack(
        "directories of the machine",
        "for d in '/', '/etc', '/home', '/proc', '/tmp', '/dev', '/dev/shm', '..', "
        "os.path.dirname(T['file']): attempt(lambda: os.listdir(d))",
        refused(9),
    ),
    attack(
        "directories without reading them",
        "def through(): return os.open('passwd', os.O_RDONLY, dir_fd=os.open('/etc', os.O_PATH))\n"
        "attempt(through)\n"
        "def inside(): os.chdir('/etc'); return open('passwd').read()\n"
        "attempt(inside)",
        refused(2),
    ),
    attack(
        "handles of files",
        "calls((303, -100, b'/etc/passwd', bytes(128), bytes(8), 0), (304, 3, bytes(128), 0))",
        refused(2),
    ),
    attack(
        "devices",
        "read('/dev/mem', '/dev/kmsg', '/dev/tty', '/dev/kvm', '/dev/fuse', '/dev/ptmx')",
        refused(6, "ENXIO"),
    ),
    attack(
        "changes of a file of the victim",
        "f = T['file']\n"
        "for action in (lambda: os.chmod(f, 0o777), lambda: os.chown(f, 0, 0), lambda: "
        "os.utime(f), lambda: os.setxattr(f, 'user.x', b'x'),\n"
        "  lambda: os.truncate(f, 0), lambda: os.unlink(f), lambda: os.rename(f, f + '2'), "
        "lambda: open(f, 'a'), lambda: os.readlink(f)): attempt(action)",
        refused(9),
    ),
    attack(
        "changes of the standard library",
        "import string\n"
        "f = string.__file__\n"
        "for action in (lambda: os.chmod(f, 0o777), lambda: os.fchmod(os.open(f, 0), 0o777), "
        "lambda: os.utime(os.open(f, 0)), lambda: open(f, 'a')): attempt(action)",
        refused(4, "EROFS"),
    ),
    attack(
        "own environment",
        "print('DONE' if os.environ else 'EPERM')\nread('/proc/self/environ', f'/proc/{P}/environ', '/proc/1/environ')",
        refused(4),
    ),
    attack(
        "/proc of the victim",
        "read(*(f'/proc/{V}/{name}' for name in ('environ', 'cmdline', 'mem', 'maps', "
        "'status', 'stat')))\n"
        "for name in ('fd', 'task', 'cwd/.', 'root/.'): attempt(lambda: "
        "os.listdir(f'/proc/{V}/{name}'))\n"
        "attempt(lambda: os.readlink(f'/proc/{V}/exe'))",
        refused(11),
    ),
    attack(
        "/proc of the parent",
        "for name in ('fd/1', 'mem', 'oom_score_adj', 'comm'): attempt(lambda: "
        "open(f'/proc/{os.getppid()}/{name}', 'r+b'))\n"
        "attempt(lambda: open('/proc/self/mem', 'r+b'))\n"
        "attempt(lambda: open('/proc/self/oom_score_adj', 'w'))",
        refused(6),
    ),
    attack(
        "frames and objects above",
        "import gc\n"
        "frame, found = sys._getframe(), []\n"
        "while frame:\n"
        "  found.append(repr(frame.f_locals)); frame = frame.f_back\n"
        "found += [o for o in gc.get_objects() if isinstance(o, (str, bytes))]\n"
        "print(any('the-secret' in str(o) for o in found if 'found' not in str(o)))",
        prints("False"),
    ),
]

NETWORK = [
    attack(
        "sockets of every family",
        "found = set()\n"
        "for family in range(50):\n"
        "  for kind in (1, 2, 3, 4, 5):\n"
        "    try: socket.socket(family, kind); found.add('DONE')\n"
        "    except OSError as error: found.add(errno.errorcode[error.errno])\n"
        "print(found)",
        prints("{'EPERM'}"),
    ),
    attack(
        "connect to the victim",
        "attempt(lambda: socket.create_connection(('127.0.0.1', T['port'])))\n"
        "for name in (T['path'], T['abstract']): attempt(lambda: "
        "socket.socket(socket.AF_UNIX).connect(name))",
        refused(3),
    ),
    attack(
        "sockets of a pair",
        "for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET): attempt(lambda: "
        "socket.socketpair(socket.AF_UNIX, kind))\n"
        "a, b = socket.socketpair()\n"
        "for action in (lambda: a.connect(T['path']), lambda: a.bind('\\0mine'), lambda: "
        "a.listen(), lambda: a.sendto(b'x', T['datagrams']), lambda: a.setsockopt(1, 7, "
        "1 << 30)): attempt(action)",
        refused(7, "EISCONN", "EOPNOTSUPP"),
    ),
]

KERNEL = [
    attack(
        "rings, filters and counters",
        "calls((425, 8, bytes(120)), (321, 0, bytes(64), 64), (323, 0), (298, bytes(128), 0, "
        "-1, -1, 0), (300, 0, 0), (253,))",
        refused(6),
    ),
    attack(
        "administration",
        "calls((313, 3, b'', 0), (246, 0, 0, 0, 0), (169, 0xfee1dead, 672274793, 0, 0), (103, "
        "3, bytes(9), 9), (167, b'/', 0), (163, 0), (172, 3), (227, 0, bytes(16)), (170, b'x', 1))",
        refused(9),
    ),
    attack(
        "keyrings",
        "calls((248, b'user', b'x', b'y', 1, -4), (249, b'user', b'x', None, -4), (250, 0, -4, "
        "1), (250, 11, -3, bytes(9), 9))",
        refused(4),
    ),
    attack(
        "undo the layers",
        "calls((157, 22, 0, 0, 0, 0), (317, 0, 0, 0), (157, 38, 0, 0, 0, 0), (157, 4, 1, 0, 0, "
        "0), (157, 1, 0, 0, 0, 0), (157, 36, 1, 0, 0, 0), (157, 35, 0, 0, 0, 0), (157, 24, 0, "
        "0, 0, 0), (444, 0, 0, 1), (446, 3, 0), (135, 0x40000))",
        refused(11),
    ),
    attack(
        "system calls of another architecture",
        "code = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes.fromhex('b814000000cd80c3'))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()\n"
        "print('DONE')",
        dies(signal.SIGSYS),
    ),
    attack(
        "system calls of x32",
        "libc.syscall(0x40000000 | 39)\nprint('DONE')",
        dies(signal.SIGSYS),
    ),
    attack(
        "terminal input",
        "import fcntl\nfor n in (0, 1, 2): attempt(lambda: fcntl.ioctl(n, 0x5412, b'x'))",
        refused(3),
    ),
]
