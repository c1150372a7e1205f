"""What the system refuses, explained in one line."""

from __future__ import annotations

import errno

_CHECK = "check the path"
REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "no file may be larger than `ulimit -f` says",
    errno.EMFILE: "raise the number of open files with `ulimit -n`",
    errno.ENFILE: "end some of what runs on this machine",
    errno.EACCES: "check its permissions, or name another",
    errno.EPERM: "check its permissions, or name another",
    errno.EROFS: "name a path that can be written",
    errno.ENOENT: _CHECK,
    errno.ENOTDIR: _CHECK,
    errno.EISDIR: _CHECK,
    errno.EEXIST: _CHECK,
    errno.ENAMETOOLONG: _CHECK,
    errno.ELOOP: _CHECK,
    errno.EIO: "the disk, or the way to it, may be failing",
    errno.ESTALE: "the file server has lost it; try again",
}
"""What a user can mend of what the system refuses. Anything else (a closed file, a connection) is a bug of ours."""
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EIO)
"""These come without a path, where an open file is written to."""


def explain_os_error(error: OSError) -> str | None:
    """One line with the path and the remedy; none where the user has none."""
    remedy = REMEDIES.get(error.errno or 0)
    if remedy is None or (error.filename is None and error.errno not in _OF_THE_MACHINE):
        return None
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror}; {remedy}"
