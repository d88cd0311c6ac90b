"""Sections for tests of sessions; the workers load them by name."""

import os
import time
from typing import Any

from blendserve.engines.native.session import Session


def open_subject(session: Session) -> str:
    session.profile["meta"]["opened"] = session.profile["meta"].get("opened", 0) + 1
    session.save()
    return "subject"


def good(session: Session, subject: str) -> None:
    for i in range(3):
        session.point(f"point {i}", 1.0, lambda i=i: {"value": i, "subject": subject}, number=i)


def failing(session: Session, _subject: Any) -> None:
    session.point("fails", 1.0, lambda: {"value": 1 / 0})
    session.point("works", 1.0, lambda: {"value": 1})
    raise ValueError("the section fails")


def hanging(session: Session, _subject: Any) -> None:
    session.point("before", 1.0, lambda: {"by": os.getpid()})
    session.point("hangs", 1.0, lambda: {"value": time.sleep(3600)}, hang_s=0.5)
    session.point("after", 1.0, lambda: {"by": os.getpid()})


def dying(session: Session, _subject: Any) -> None:
    for i in range(4):
        session.point(f"dies {i}", 1.0, lambda: os._exit(9))


def long(session: Session, _subject: Any) -> None:
    session.point("for ever", 1.0, lambda: {"value": time.sleep(3600)})
