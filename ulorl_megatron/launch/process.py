"""Child processes that do not outlive their parent."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork


def die_with_parent() -> None:
    """Asks Linux to SIGKILL this process when its parent ends, however it ends (kill -9 included).

    For `preexec_fn` of subprocess.Popen. The parent must start it from a thread that lives as long as it does: the
    signal is tied to the starting thread.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() == 1:  # the parent was gone before the call
        os.kill(os.getpid(), signal.SIGKILL)
