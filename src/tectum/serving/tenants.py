"""On whose behalf a call is made, so far as its door can tell: by its token, or by what a trusted proxy says.

Rows are never shared between tenants. A token that belongs to one speaks for it alone: what a body calls its tenant is
then a part of that tenant. A token without one may speak for any, as a proxy has to.
"""

from __future__ import annotations

from contextvars import ContextVar

#: the tenant that the caller's credentials name; a call is served in a context of its own
of_caller: ContextVar[str] = ContextVar("tenant", default="")


def effective(named: str) -> str:
    """The tenant of a request whose body names `named` (or nothing: empty)."""
    by_credentials = of_caller.get()
    return f"{by_credentials}/{named}" if by_credentials and named else by_credentials or named
