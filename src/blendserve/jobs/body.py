"""Values of a request's body, and what to say of those that cannot be."""

from __future__ import annotations

from typing import Any

import orjson

from blendserve.errors import RequestError


def require(values: dict[str, Any], name: str, remedy: str, where: str = "") -> Any:
    """A value that must be there, and not null.

    Raises:
        RequestError: it is missing.
    """
    value = values.get(name)
    if value is None:
        param = f"{where}.{name}" if where else name
        raise RequestError(
            "missing_required_parameter", f"Missing required parameter '{param}'. {remedy}", param=param
        )
    return value


def invalid(param: str, value: Any, expected: str) -> RequestError:
    """The error of a parameter with a value that cannot be."""
    return RequestError(
        "invalid_request", f"Invalid '{param}': found {shown(value)}, expected {expected}.", param=param
    )


def unsupported(param: str, value: Any, remedy: str) -> RequestError:
    """The error of a parameter that cannot be honoured."""
    return RequestError(
        "unsupported_parameter", f"'{param}': {shown(value)} is not supported. {remedy}", param=param
    )


def shown(value: Any) -> str:
    """A JSON value for a message, cut where it is long."""
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # it reads deeper nesting than it writes
        return "a deeply nested value"
    return text if len(text) <= 60 else f"{text[:57]}..."
