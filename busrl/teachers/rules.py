"""Rules about [[learner.teacher]]: what a teacher is, which prompts it teaches, and what it cannot go with.

Looks at a topology's settings alone. Plugged into `busrl check` with the other rules; folders are looked at with those
of the other models.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator

from busrl.algorithms import catalog
from busrl.preflight.findings import Check, Clash, Finding, clashes, is_url
from busrl.topology.schema import ATROPOS, Topology

ROWS, TOP = "learner.teacher", "learner.teacher_top"
KINDS = ("path", "base_url", "posted")


def _posted(t: Topology) -> bool:
    return any(row.posted for row in t.learner.teacher)


def _asked(t: Topology) -> bool:
    return any(row.base_url for row in t.learner.teacher)


def _tagged(t: Topology) -> bool:
    return any(row.tag for row in t.learner.teacher)


def _plays(t: Topology) -> bool:
    return any(entry.role == ATROPOS for entry in t.process)


TABLE = (
    Clash(("model.teacher", ROWS), lambda t: t.model.teacher and t.learner.teacher,
          "there are two lists of teachers; put the folder into a [[learner.teacher]] as path"),
    Clash((ROWS, "learner.teacher_coef"),
          lambda t: t.learner.teacher and not catalog.taught(t.learner) and t.learner.loss in catalog.LOSS_FACTS,
          'nothing reads the teachers; loss = "topk_kl", teacher_coef > 0, or remove them',
          hidden=("learner.loss",), warning=True),
    Clash((TOP, ROWS), lambda t: t.learner.teacher_top == "student" and not (t.learner.teacher or t.model.teacher),
          'there is no teacher to learn from; add a [[learner.teacher]], or teacher_top = "teacher"'),
    Clash((TOP, ROWS), lambda t: t.learner.teacher_top == "student" and _posted(t),
          'what is posted has tokens of the teacher\'s choice; teacher_top = "teacher"'),
    Clash((ROWS,), lambda t: any(row.base_url and not is_url(row.base_url) for row in t.learner.teacher),
          "a base_url is not the address of an endpoint; for example http://127.0.0.1:8000/v1"),
    Clash((ROWS, "process"), lambda t: _posted(t) and not _plays(t),
          'nothing posts it; add a [[process]] with role = "atropos", or name a path or base_url'),
    Clash((ROWS, "process"), lambda t: _tagged(t) and _plays(t),
          "environments have prompts of their own, without tags; remove the tags"),
    Clash((ROWS,), lambda t: _posted(t) and len(t.learner.teacher) > 1,
          "every group is posted with its teacher; leave that one alone"),
    Clash((ROWS, "generation.temperature"), lambda t: _asked(t) and t.generation.temperature != 1,
          "an endpoint gives log-probabilities at temperature 1; temperature = 1, or a teacher with a path"),
    Clash((ROWS, "process"), lambda t: t.rank_hosts and (_tagged(t) or _posted(t)),
          "ranks on other hosts have no prompts and no posted groups; keep the ranks here, or remove the tags"),
)


def _rows(t: Topology) -> Iterator[Finding]:
    """Findings about each teacher by itself, and about its tag."""
    tags = [row.tag for row in t.learner.teacher]
    for number, row in enumerate(t.learner.teacher):
        key = f"{ROWS}.{number}"
        if sum(bool(getattr(row, kind)) for kind in KINDS) != 1:
            rule = "a teacher is one of these: " + ", ".join(KINDS)
            yield Finding((f"{key}.path", f"{key}.base_url", f"{key}.posted"), rule, "set one of them")
        parts = urllib.parse.urlsplit(row.base_url)
        if row.base_url and (parts.scheme not in ("http", "https") or not parts.netloc):
            yield Finding((f"{key}.base_url",), "no address of an endpoint", 'for example "http://127.0.0.1:8000/v1"')
        if tags.index(row.tag) < number:
            yield Finding((f"{key}.tag",), "two teachers have this tag", "give each its own; one may have none")


def _sources(t: Topology) -> Iterator[Finding]:
    """A finding about the first source whose prompts no teacher teaches, as far as sources tell their tags."""
    tags = {row.tag for row in t.learner.teacher}
    if not tags or "" in tags or t.validation.tag_key:
        return
    for number, source in enumerate(t.data.source):
        if source.tag and source.tag not in tags:
            rule = f"no teacher has the tag {source.tag!r} of these prompts"
            yield Finding((f"data.source.{number}.tag", ROWS), rule, 'add one with that tag, or with tag = ""')
            return


CHECKS: tuple[Check, ...] = (lambda t: clashes(t, TABLE), _rows, _sources)
