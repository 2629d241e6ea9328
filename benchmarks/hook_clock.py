"""How long vLLM spends in the hooks of a connector."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class HookClock:
    """Context manager: as often as it is entered, the hooks of a class of connectors are timed.

    Both halves of an engine in one process are of one class. A hook called by another one belongs
    to that.
    """

    def __init__(self, connectors: type) -> None:
        self.seconds: dict[str, float] = {}
        self._connectors = connectors
        self._replaced: dict[str, Any] = {}
        self._is_inside = False

    def __enter__(self) -> HookClock:
        for name, hook in list(vars(self._connectors).items()):
            declared = any(hasattr(base, name) for base in self._connectors.__mro__[1:])
            if name.startswith("_") or not callable(hook) or not declared:
                continue
            self._replaced[name] = hook
            setattr(self._connectors, name, self._timed(name, hook))
        return self

    def __exit__(self, *error: object) -> None:
        for name, hook in self._replaced.items():
            setattr(self._connectors, name, hook)
        self._replaced.clear()

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return hook(*args, **kwargs)
            self._is_inside = True
            begin = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                took = time.perf_counter() - begin
                self.seconds[name] = self.seconds.get(name, 0.0) + took
                self._is_inside = False

        return timed
