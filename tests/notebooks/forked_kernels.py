"""Notebooks' kernels as forks of one process that has imported what most of them import, each a process of its own."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import pytest
from jupyter_client.provisioning import local_provisioner

# None of the lab, whose imports are the notebooks' own.
IMPORTED_ONCE = ["IPython", "ipykernel.kernelapp", "matplotlib_inline.backend_inline", "matplotlib.pyplot", "torch"]


class ForkedKernel:
    """A running kernel, with the part of `subprocess.Popen` that Jupyter uses."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], *, cwd: str, **_: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=run_kernel, args=(command[command.index("-f") + 1], cwd, sender))
        self._process.start()
        receiver.recv()  # it leads its own group, to which Jupyter sends its signals
        self.pid = self._process.pid
        self.send_signal = lambda signum: os.kill(self.pid, signum)
        self.kill, self.terminate = self._process.kill, self._process.terminate

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def run_kernel(connection_file: str, cwd: str, started: Connection) -> None:
    """Run a kernel until it is shut down."""
    os.setsid()
    started.send(None)
    os.chdir(cwd)
    from ipykernel.kernelapp import IPKernelApp

    IPKernelApp.launch_instance(argv=["-f", connection_file])


@contextmanager
def forked_kernels() -> Iterator[None]:
    """Fork the kernels that Jupyter starts meanwhile."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED_ONCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_provisioner, "launch_kernel", ForkedKernel)
        yield
    forkserver._forkserver._stop()  # else it ends with this process, which nobody waits for
