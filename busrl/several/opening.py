"""The scheduler's part that opens draws with several sides: in every ledger, in an order that no death can confuse.

    open                        one pass, after the scheduler's own scan
     |- Book.look               the view of each ledger that is not finished, and its room
     |- plan_of                 what each ledger has of the draws: new ones, and what is to be mended
     |- _finish                 members due in a ledger by its own view: lost ones, re-rolls
     |- _mend                   groups that a ledger lacks of a draw that is open, or that another one has
     '- _new                    whole draws: followers first, seats from the last to the first, the lead side last

Talks to the rings (FREE -> RESERVED* -> QUEUED, fates, the header word next_admission). `draws` makes the decisions,
`busrl.scheduling` those about room. Knows nothing of episodes.

- A new draw is opened only where every ledger has room for it: the slowest learner holds the others back.
- All that is known here follows from rings and fates: a successor continues where this process was killed.
- A group that is lacking beside an open one of its draw was admitted with it: it needs a slot, and no room.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from busrl.data import JsonlStream
from busrl.roles.ledgers import Ledger, others_of
from busrl.roles.scheduler import Scheduler, fields_of, repair_next_admission, require_fates, room_of
from busrl.scheduling.admission import Admission, Room
from busrl.scheduling.groups import (
    UNKNOWN,
    Bools,
    GroupScanner,
    GroupView,
    Lines,
    Todo,
    in_a_row,
    slot_priority,
)
from busrl.several.draws import Had, Plan, last_first, plan_of, stands
from busrl.states import HeaderWord, State, uid_of
from busrl.topology import Topology

REACH = 4  # x B: groups of which the open ones are some, as others beside them have ended


class Book:
    """The scheduler's knowledge of one ledger: its view as of this pass, and the room that is left in it."""

    def __init__(self, ledger: Ledger, scanner: GroupScanner, stream: JsonlStream) -> None:
        self.ledger, self.scanner, self._stream = ledger, scanner, stream
        self._admit()
        self.look(*self.scan())

    def follow(self, topology: Topology) -> None:
        """Go by this topology, which was changed in flight."""
        self.ledger.follow(topology)
        self._admit()

    def _admit(self) -> None:
        topology = self.ledger.topology
        self.admission = Admission(topology.derived.limits, topology.weights.over_age)

    def scan(self) -> tuple[GroupView, Lines]:
        """The open groups, and the lines by which they are."""
        lines = self.ledger.ring.lines()  # before the fates
        if len(self.ledger.fates) != len(self.scanner.fates):
            self.scanner.read_from(self.ledger.fates.view())
        return self.scanner.scan(lines), lines

    def look(self, view: GroupView, lines: Lines) -> None:
        """Begin a pass with this view."""
        ledger = self.ledger
        self.view, self.room = view, room_of(ledger.ring, ledger.topology, self.admission, view, lines)

    @property
    def had(self) -> Had:
        reach = REACH * self.admission.limits.B // self.ledger.seats
        return Had(self.ledger.seats, self.view.end, self.view.missing, self.view.draws, reach)

    @property
    def draws(self) -> int:
        """Draws for which there is room."""
        return max(0, self.room.groups) // self.ledger.seats

    def take(self, groups: int) -> None:
        """Count groups that were opened in this pass."""
        self.room = replace(self.room, groups=self.room.groups - groups)

    def index_beside(self, group: int) -> int:
        """The admission index of a group whose draw is open here already; UNKNOWN where it is not."""
        seats, view = self.ledger.seats, self.view
        first = group - group % seats
        beside = ((view.draws >= first) & (view.draws < first + seats) & (view.admission != UNKNOWN)).nonzero()[0]
        if not len(beside):
            return UNKNOWN
        other = int(beside[0])
        return int(view.admission[other]) - int(view.draws[other]) + group

    def newest_index(self, seat: int) -> int:
        """The index that a group without one shares: that of the newest draw, as a new one would shift the rounds of
        sync."""
        return max(0, self.ledger.ring.header(HeaderWord.NEXT_ADMISSION) - self.ledger.seats) + seat

    def put(self, group: int, attempt: int, member: int, members: int, index: int) -> int:
        """Dispatch `members` of a group, `member` the first of them; how many found a slot."""
        ledger, first = self.ledger, uid_of(group, attempt, member, self.ledger.size)
        require_fates(ledger.fates, ledger.paths.fates, first + members, ledger.size, ledger.seats)
        ledger.fates.reserve(first + members)
        item = self._stream.item(group // ledger.seats)
        fields = fields_of(ledger.ring, ledger.topology, item, group, index, slot_priority(index))
        return len(ledger.ring.dispatch(uid=first, member=member, members=members, **fields))

    def put_group(self, group: int, index: int) -> bool:
        """Dispatch all members of a group; False if some found no slot."""
        return self.put(group, 0, 0, self.ledger.size, index) == self.ledger.size


class Opening:
    """Opens what may be opened now in all ledgers."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, others, stream = scheduler, others_of(scheduler), scheduler.stream
        self._own = Book(Ledger.own(scheduler), scheduler.scanner, stream)
        for ledger in others:
            scheduler.reap_predecessor(ledger.ring)
            repair_next_admission(ledger.ring)
            ledger.ring.set_ready()
            scheduler.other_rings.append(ledger.ring)
        self._others = [Book(ledger, scanner_of(ledger), stream) for ledger in others]
        self.books = (self._own, *self._others)

    def follow(self) -> None:
        """Go by the scheduler's present topology."""
        topology = self._scheduler.topology
        for book in self.books:
            book.follow(topology.of(book.ledger.tag))

    @property
    def running(self) -> bool:
        """True while a model has steps to make."""
        return any(book.ledger.running for book in self.books)

    def metrics(self) -> dict[str, float]:
        """Numbers for SCHEDULER_STATE: the room of the models beside the scheduler's own, in draws."""
        return {f"room/{book.ledger.tag}": float(book.draws) for book in self._others}

    def close(self) -> None:
        for book in self._others:
            book.ledger.close()

    def signs(self) -> tuple[int, ...]:
        """Numbers of the other ledgers of which one must change before there is anything to dispatch."""
        words = (
            HeaderWord.STEP, HeaderWord.VERSION, HeaderWord.UNPUBLISHED_GROUPS, HeaderWord.RUN_STATE,
            HeaderWord.GENERATION_PAUSE,
        )
        rings = (book.ledger.ring for book in self._others)
        return tuple(number for ring in rings for number in (ring.transitions(State.FREE), *map(ring.header, words)))

    def open(self, view: GroupView, lines: Lines, arrived: int) -> Room:
        """Dispatch what is due, what is lacking, and new draws; the room that is left for these, or why there is none.

        `view`, `lines`: of the scheduler's own ledger; `arrived`: draws below are there.
        """
        books = self._look(view, lines)
        for book in books:
            if held := self._held(book):
                return Room(0, f"{held} ({book.ledger.tag})")
        if not books:
            return Room(0, "finished")
        plan = plan_of([book.had for book in books])
        for book in reversed(books):
            self._finish(books, book)
        for book, groups in reversed([*zip(books, plan.mends)]):
            self._mend(books, book, groups)
        return self._new(books, plan, arrived)

    def _look(self, view: GroupView, lines: Lines) -> list[Book]:
        """The ledgers that are not finished, the lead's first, as they are now."""
        self._own.look(view, lines)
        for book in self._others:
            book.look(*book.scan())
        return [book for book in self.books if book.ledger.running]

    def _held(self, book: Book) -> str:
        """Name why nothing may be opened because of a model: its learner is not there yet, and what is dispatched now
        would look too old; or its table of fates is damaged."""
        if book.ledger.ring.header(HeaderWord.GENERATION_PAUSE):
            return "starting"
        return "fates" if self._scheduler.is_damaged(book.view, book.ledger.paths.fates) else ""

    def _finish(self, books: Sequence[Book], book: Book) -> None:
        """Dispatch members of open groups while a slot is free, those of the lead side last."""
        seats = book.ledger.seats
        for first, members in in_a_row(sorted(book.view.todo, key=lambda todo: _is_lead(books, book, todo.draw))):
            ready = self._ready(books, first, members) if _is_lead(books, book, first.draw) else members
            index = first.admission if first.admission >= 0 else book.newest_index(first.draw % seats)
            if ready and book.put(first.draw, first.attempt, first.member, ready, index) < ready:
                break

    def _mend(self, books: Sequence[Book], book: Book, lacking: Sequence[int]) -> None:
        """Open groups that this ledger lacks."""
        seats = book.ledger.seats
        for draw, groups in itertools.groupby(last_first(lacking, seats), lambda group: group // seats):
            self._mend_draw(books, book, draw, [*groups])

    def _mend_draw(self, books: Sequence[Book], book: Book, draw: int, groups: Sequence[int]) -> None:
        seats = book.ledger.seats
        if len(groups) == seats:
            if book.draws:
                self._draw(books, book, draw)
            return
        for group in groups:
            index = book.index_beside(group)
            if index == UNKNOWN and not book.draws:
                return
            if _is_lead(books, book, group) and not self._ready_group(books, draw):
                return
            if index == UNKNOWN:
                index = book.newest_index(group % seats)
                book.take(1)
            if not book.put_group(group, index):
                return

    def _new(self, books: Sequence[Book], plan: Plan, arrived: int) -> Room:
        """Open new draws, where every ledger has room for them."""
        least = min(books, key=lambda book: book.draws)  # of equal ones the lead's
        if not least.draws:
            return self._waits(least)
        draws = [*plan.draws(least.draws, arrived)]
        for draw in draws:
            if not all(self._draw(books, book, draw) for book in reversed(books)):
                break  # a slot was taken meanwhile: the next pass mends it
        return Room(len(draws) * books[0].ledger.seats) if draws else Room(0, "arrivals")

    def _waits(self, book: Book) -> Room:
        beside = f" ({book.ledger.tag})" if book is not self._own else ""
        return Room(0, f"{book.room.reason}{beside}", book.room.group)

    def _draw(self, books: Sequence[Book], book: Book, draw: int) -> bool:
        """Open all groups of a draw in a ledger; False if some could not be."""
        ring, seats = book.ledger.ring, book.ledger.seats
        base, begun, whole = ring.header(HeaderWord.NEXT_ADMISSION), False, True
        for group in last_first(range(draw * seats, (draw + 1) * seats), seats):
            whole = not _is_lead(books, book, group) or self._ready_group(books, draw)
            placed = book.put(group, 0, 0, book.ledger.size, base + group % seats) if whole else 0
            begun, whole = begun or placed > 0, placed == book.ledger.size
            if not whole:
                break
        if begun:  # after its members: once the indices are counted, what is lacking is known to be of this draw
            ring.set_header(HeaderWord.NEXT_ADMISSION, base + seats)
            book.take(seats)
        return whole

    def _ready(self, books: Sequence[Book], first: Todo, members: int) -> int:
        """Count the members of the lead side that may be queued: those before one of which a side has no fate."""
        standing = self._stand(books, first.draw // books[0].ledger.seats, first.attempt)
        ready = standing[first.member : first.member + members]
        return members if ready.all() else int(np.argmin(ready))

    def _ready_group(self, books: Sequence[Book], draw: int) -> bool:
        """Tell whether the lead side of a draw may be opened whole."""
        return bool(self._stand(books, draw).all())

    def _stand(self, books: Sequence[Book], draw: int, attempt: int = 0) -> Bools:
        """By member: all sides but the lead side have a fate in this try, or will have none."""
        size = books[0].ledger.size
        standing = np.ones(size, np.bool_)
        for book in books:
            seats = book.ledger.seats
            for group in range(draw * seats + (book is books[0]), (draw + 1) * seats):
                standing &= stands(book.ledger.codes(group), size, attempt)
        return standing


def scanner_of(ledger: Ledger) -> GroupScanner:
    return GroupScanner(ledger.fates.view(), ledger.size, horizon=ledger.topology.derived.horizon)


def _is_lead(books: Sequence[Book], book: Book, group: int) -> bool:
    """Tell whether the group is that of the lead side: the first seat of the first ledger that is not finished."""
    return book is books[0] and group % book.ledger.seats == 0
