"""Every error BlendServe raises on purpose.

```
BlendServeError
├── ConfigError            an option or file of the user's is unusable; the job cannot run   (exit 2)
│   ├── ModelError         the model cannot be found, read or is of an unsupported type      (exit 2)
│   ├── PlanError          a saved plan does not fit the job                                 (exit 2)
│   └── PromptError        a prompt or parameter given to `LLM` cannot run; a ValueError too (raised)
├── EngineError            the engine broke while running; finished results are kept         (exit 2)
│   ├── StepError          one step failed; its requests can be tried again                  (retried)
│   │   └── EngineDiedError  the engine is gone and must be opened anew                      (restarted)
│   └── FailedRequestsError  some requests of an `LLM` call failed; it has the other outputs (raised)
└── RequestError           one line of the input cannot be served; the rest of the job runs  (exit 1)
```

Each message says what was found and what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class BlendServeError(Exception):
    """Base of all errors raised by BlendServe."""


class ConfigError(BlendServeError):
    """An option, a file or a combination of them cannot be used; nothing was run."""


class ModelError(ConfigError):
    """The model cannot be found or read, or its architecture is not supported."""


class PlanError(ConfigError):
    """A saved plan cannot be read or belongs to another job."""


class PromptError(ConfigError, ValueError):
    """A prompt, or what was asked for it, cannot be run; nothing of the call was.

    `index` is the number of the prompt in the call, None where the whole call is wrong.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class EngineError(BlendServeError):
    """The engine stopped working; results written so far stay valid and the job can be resumed."""


class StepError(EngineError):
    """A step failed and what it computed is lost; the engine can run again.

    `requests` are the numbers of the requests in the step, one of which may be to blame.
    """

    def __init__(self, message: str, requests: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.requests = tuple(requests)


class EngineDiedError(StepError):
    """The engine's process has ended, or it can no longer run anything; only a new engine can go on."""


class FailedRequestsError(EngineError):
    """Requests failed while the others of the same call ran to their end.

    `outputs` has, by the number of the prompt in the call, what the call would have returned; outputs of failed
    requests have an `error`.
    """

    def __init__(self, message: str, outputs: Mapping[int, Any]) -> None:
        super().__init__(message)
        self.outputs = outputs


class RequestError(BlendServeError):
    """One request cannot be served.

    `code`, `param` and the message are what the error file shows, in the OpenAI error shape; the message names the
    remedy. `status_code` is the HTTP status the OpenAI API would have answered with.
    """

    def __init__(self, code: str, message: str, *, param: str | None = None, status_code: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.status_code = status_code
