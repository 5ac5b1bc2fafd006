"""Imports without torch, threads, and forked processes."""

import multiprocessing
import os
import shutil
import subprocess
import sys
import threading

import heddle
import numpy as np
import torch


def run(code):
    """Runs `code` in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_works_where_torch_cannot_be_imported():
    out = run(
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, heddle\n"
        "q = np.ones((1, 4, 2, 8), np.float32)\n"
        "print(heddle.attention(q, q, q, causal='top_left').sum(), heddle.explain(q, q, q).chosen.name)\n"
        "try: heddle.sdpa(q, q, q)\n"
        "except TypeError as error: print(error)\n"
    )
    assert out.startswith("64.0 ") and "it must be a torch tensor" in out


def test_parts_that_need_torch_say_how_to_install_it():
    parts = ("distributed", "nn", "nsa", "selection", "flash_attn", "flash_attn_3")
    for statement in ("import heddle.{}", "import heddle; heddle.{}", "from heddle import {}"):
        out = run(
            "import sys; sys.modules['torch'] = None\n"
            f"for statement in {[statement.format(part) for part in parts]}:\n"
            "    try: exec(statement)\n"
            "    except ImportError as error: print(error)\n"
        )
        lines = out.splitlines()
        assert len(lines) == len(parts)
        for line in lines:
            assert "this part of heddle needs torch, which cannot be imported" in line
            assert "pip install 'torch>=2.6'" in line
    out = run(
        "import sys; sys.modules['torch'] = None\n"
        "from heddle import lowbit\n"
        "try: lowbit.load('x', 'y', framework='torch')\n"
        "except ImportError as error: print(error)\n"
    )
    assert "pip install 'torch>=2.6'" in out


def test_module_without_the_command_says_how_to_get_it(tmp_path):
    package = os.path.dirname(heddle.__file__)
    shutil.copy(os.path.join(package, "__main__.py"), tmp_path)  # beside it there is no command then
    done = subprocess.run(
        [sys.executable, tmp_path / "__main__.py", "info"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 3
    assert "built without the command" in done.stderr and "HEDDLE_BUILD_CLI=ON" in done.stderr


def test_module_becomes_the_command_beside_it(tmp_path):
    main, command = tmp_path / "__main__.py", tmp_path / "bin" / "heddle"
    shutil.copy(os.path.join(os.path.dirname(heddle.__file__), "__main__.py"), main)
    command.parent.mkdir()
    command.write_text('#!/bin/sh\necho "$@"\nexit 2\n')
    command.chmod(0o755)
    done = subprocess.run([sys.executable, main, "info", "a b"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "info a b\n")


def test_importing_does_not_import_torch():
    assert run("import sys, heddle; print('torch' in sys.modules)").strip() == "False"


def test_first_call_may_be_a_compiled_one():
    code = (
        "import heddle, torch\n"
        "f = torch.compile(lambda q: heddle.attention(q, q, q).sum(), fullgraph=True, backend='aot_eager')\n"
        "q = torch.ones(1, 4, 2, 8, requires_grad=True)\n"
        "f(q).backward(); print(q.grad.shape)\n"
    )
    assert run(code).strip() == "torch.Size([1, 4, 2, 8])"


def test_threads_at_once():
    torch.manual_seed(0)
    inputs = [torch.randn(2, 100 + 30 * n, 4, 32, requires_grad=True) for n in range(3)]

    def gradient(q):
        return torch.autograd.grad(heddle.attention(q, q, q, causal="top_left").square().sum(), q)[0]

    expected = [gradient(q) for q in inputs]
    failures = []

    def work(n):
        try:
            for _ in range(10):
                assert torch.equal(gradient(inputs[n]), expected[n])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_that_cannot_be_started_are_an_error():
    """And no hang: those that were started are joined, and fewer can be asked for."""
    code = (
        "import resource, heddle, numpy as np\n"
        "q = np.ones((1, 64, 4, 8), np.float32)\n"
        "heddle.set_num_threads(2); expected = heddle.attention(q, q, q)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20),) * 2)\n"  # stacks of 64 threads
        "heddle.set_num_threads(400)\n"
        "for _ in range(2):\n"
        "    try: heddle.attention(q, q, q)\n"
        "    except RuntimeError as error: print(error)\n"
        "heddle.set_num_threads(2)\n"
        "print(heddle.num_threads(), np.array_equal(heddle.attention(q, q, q), expected))\n"
        "print(len(__import__('os').listdir('/proc/self/task')) < 40)\n"
    )
    first, second, fewer, joined = run(code).splitlines()
    for said in (first, second):
        asked, reached = (int(word) for word in said.split() if word.isdigit())
        assert asked == 400 and 1 < reached < 400 and "HEDDLE_NUM_THREADS asks for fewer" in said
    assert fewer == "2 True" and joined == "True"


def _child(queue, q):
    queue.put((heddle.attention(q, q, q), heddle.num_threads()))


def test_a_forked_process_can_call():
    q = np.random.default_rng(0).standard_normal((2, 200, 4, 32)).astype(np.float32)
    expected = heddle.attention(q, q, q)  # the parent's pool has started
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_child, args=(queue, q))
    process.start()
    found, threads = queue.get(timeout=60)
    process.join(timeout=60)
    assert process.exitcode == 0 and threads == heddle.num_threads()
    assert np.array_equal(found, expected)
    assert np.array_equal(heddle.attention(q, q, q), expected)


def test_enum_and_candidates_can_be_pickled():
    import pickle

    assert pickle.loads(pickle.dumps(heddle.Causal.top_left)) is heddle.Causal.top_left
    found = heddle.explain((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))
    assert pickle.loads(pickle.dumps(found)) == found
