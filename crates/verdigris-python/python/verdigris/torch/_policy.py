"""Under which policy calls are planned: one for the process, and one for a `with` block of a thread.

A gradient is computed under the policy that its forward call had.
"""

import contextlib

from .. import _native
from .._native import Policy


def set_policy(policy=None, **keywords):
    """Sets the policy of all threads that are in no `policy` block. Takes a `verdigris.Policy` or its keywords; nothing is the default.

    Plans that were made under another policy stay, and serve again when it comes back.
    """
    _native.set_default_policy(_native.policy_number(_policy(policy, keywords)))


def get_policy():
    """The policy of this thread."""
    return _native.numbered_policy(_native.current_policy())


@contextlib.contextmanager
def policy(policy=None, **keywords):
    """A block of this thread under another policy: `with policy(precision="tf32", mode="measured"): ...`."""
    chosen = _policy(policy, keywords)
    former = _native.exchange_thread_policy(_native.policy_number(chosen))
    try:
        yield chosen
    finally:
        _native.exchange_thread_policy(former)


def _policy(policy, keywords):
    if policy is not None and keywords:
        raise TypeError("a policy is given whole, or by its keywords")
    return Policy(**keywords) if policy is None else policy
