"""Bytes from one rank to another through memory they share: the two ends of one direction of one pair.

Both ends are told the same messages, (address, bytes), in the same order, so nothing has a header. A message
takes one of two ways:

    ring      through a ring of bytes in the sender's buffer, in pieces
    direct    the receiver wants it in its own peer memory and has said where (it *offered* a place): the
              sender writes it there, and the receiver has nothing left to copy

The sender never waits for an offer. It looks for one before each piece; when it comes, what is left goes
there. Otherwise two ranks would stay apart: the one that comes first uses the ring, so the other one has more
to copy, and comes later again.

Positions count the bytes in the ring, and one for the direct part of a message. The sender posts how far it
has *written*, the receiver how far it has *taken*. An offer is one word, (number of the message, place), so
it is there or not; so is the answer of the sender, (number of the message, bytes of it in the ring), given
before it posts. When the ring is empty a message may start at its front again, which caches still hold; that
is in the answer, too.

Hazard: what a message is to be sent from must not change, and what it is received into must not be used,
before it has passed. Offers are few: a receiver makes none while OFFERS messages are open, so that neither
its words nor its sender's answers are overwritten before they are read.

Words are read and written here without `Signals.wait`, so fences stand here, too. Between a peer's word and
what it speaks of, to be read or to be overwritten, there is an `acquire`; posts and offers come behind a
`release`.
"""

from __future__ import annotations

from collections import deque
from ctypes import memmove
from dataclasses import dataclass
from typing import Protocol

from moeclipse.comm.shared.signals import WORD, Signals

PIECE_BYTES = 128 << 10  # posted at a time, so that the receiver can take while the sender writes
OFFERS = 4
WORDS_PER_FLOW = 2 + 2 * OFFERS
NEAR_BYTES = 256 << 10  # of the ring that are used before it begins anew
HALF = (1 << 32) - 1
MAX_PLACE = (1 << 31) - 2  # messages that are offered a place are shorter, too
FRONT = 1 << 31  # in an answer: the message starts at the front of the ring
ALL = FRONT - 1  # in an answer: no part of it is direct so far


def stamped(number: int, value: int) -> int:
    """Both in one word, which is never zero, as words are at first."""
    return (number + 1 & HALF) << 32 | value


class Passing(Protocol):
    """Whoever wants to know how many bytes of its messages have not passed yet."""

    open_bytes: int


@dataclass(frozen=True)
class RingPlace:
    """What both ends of a flow have in common."""

    ring: int
    """Address of the ring."""
    room: int
    """Bytes of the ring."""
    first_word: int
    """Of WORDS_PER_FLOW: written, taken, offers, answers."""
    receiver: int
    """Address of the receiver's buffer, where offered places lie."""


class Message:
    __slots__ = ("address", "begun", "front", "left", "number", "owner")

    def __init__(self, address: int, left: int, owner: Passing, number: int) -> None:
        self.address, self.left, self.owner, self.number = address, left, owner, number
        self.begun = 0  # bytes that went through the ring
        self.front = 0  # or FRONT


class Flow:
    """What is common to both ends. Bytes are moved by address: slicing tensors takes longer than copying
    a few kilobytes."""

    def __init__(self, signals: Signals, place: RingPlace, peer: int) -> None:
        self._signals, self._place, self.peer = signals, place, peer
        self._written, self._taken = place.first_word, place.first_word + 1
        # Where in `signals.words`: reading them one by one through calls takes longer than a small copy.
        self._written_at, self._taken_at = self._written * WORD, self._taken * WORD
        self._offers_at = (place.first_word + 2) * WORD
        self._answers_at = self._offers_at + OFFERS * WORD
        self.position = 0
        self._count = 0  # messages so far
        self.queue: deque[Message] = deque()

    @property
    def awaited(self) -> tuple[int, int]:
        """(word, value) whose coming lets this flow go on."""
        raise NotImplementedError

    def move(self) -> bool:
        """Pass what can pass now; whether anything did."""
        raise NotImplementedError

    def _queue(self, address: int, count: int, owner: Passing) -> Message:
        owner.open_bytes += count
        message = Message(address, count, owner, self._count)
        self._count += 1
        self.queue.append(message)
        return message

    def _advance(self, message: Message, count: int) -> None:
        """So many bytes passed through the ring."""
        self.position += count
        message.begun += count
        message.address += count
        message.left -= count
        message.owner.open_bytes -= count
        if not message.left:
            self.queue.popleft()

    def _pass(self, message: Message) -> None:
        """The rest of it went directly."""
        self.position += 1
        message.owner.open_bytes -= message.left
        self.queue.popleft()


class Sender(Flow):
    def __init__(self, signals: Signals, place: RingPlace, peer: int) -> None:
        super().__init__(signals, place, peer)
        self._floor = 0  # where the ring was empty and began anew
        self._near = min(NEAR_BYTES, place.room // 2)

    def send(self, address: int, count: int, owner: Passing) -> None:
        """Add a message and write what there is room for."""
        if not self.queue and count <= PIECE_BYTES:
            # As `move` does it, for the small messages that nothing stands in the way of.
            words, room, number = self._signals.words, self._place.room, self._count
            start = self.position % room
            fits = start + count <= self._near and self.position + count - words[self._taken_at] <= room
            if fits and words[self._offers_at + number % OFFERS * WORD] >> 32 != number + 1 & HALF:
                self._signals.fence.acquire()  # what was taken may be overwritten
                memmove(self._place.ring + start, address, count)
                self._count = number + 1
                self.position += count
                self._signals.post(self._written, self.position)
                return
        self._queue(address, count, owner)
        self.move()

    @property
    def awaited(self) -> tuple[int, int]:
        return self._taken, self.position - self._place.room + 1

    def move(self) -> bool:
        """Write what there is room for; whether anything moved."""
        begun, words, room = self.position, self._signals.words, self._place.room
        while self.queue:
            message = self.queue[0]
            slot = message.number % OFFERS * WORD
            offer, taken = words[self._offers_at + slot], words[self._taken_at]
            self._signals.fence.acquire()  # what was offered or taken may be overwritten
            if offer >> 32 == message.number + 1 & HALF:
                place = self._place.receiver + (offer & HALF) + message.begun
                memmove(place, message.address, message.left)
                words[self._answers_at + slot] = stamped(message.number, message.front | message.begun)
                self._pass(message)
            else:
                start = self.position % room
                if start >= self._near and not message.begun and taken == self.position:
                    message.front = FRONT
                    words[self._answers_at + slot] = stamped(message.number, FRONT | ALL)
                    self.position = self._floor = self.position + room - start
                    start = 0
                free = room - self.position + max(taken, self._floor)
                count = min(free, message.left, PIECE_BYTES, room - start)
                if count <= 0:
                    break
                memmove(self._place.ring + start, message.address, count)
                self._advance(message, count)
            self._signals.post(self._written, self.position)
        return self.position > begun


class Receiver(Flow):
    def expect(self, address: int, count: int, owner: Passing, place: int | None) -> None:
        """Add a message. `place`: where in this rank's buffer it is wanted, if it is."""
        few = len(self.queue) < OFFERS
        message = self._queue(address, count, owner)
        if place is not None and few:
            slot = message.number % OFFERS * WORD
            self._signals.fence.release()  # whatever used the place before no longer does
            self._signals.words[self._offers_at + slot] = stamped(message.number, place)

    @property
    def awaited(self) -> tuple[int, int]:
        return self._written, self.position + 1

    def move(self) -> bool:
        """Take what the peer wrote; whether anything moved."""
        begun, words, room = self.position, self._signals.words, self._place.room
        while self.queue:
            written = words[self._written_at]
            if written <= self.position:
                break
            message = self.queue[0]
            most = message.left
            self._signals.fence.acquire()
            # Read after `written`: the answer was given before that counted a direct part.
            answer = words[self._answers_at + message.number % OFFERS * WORD]
            if answer >> 32 == message.number + 1 & HALF:
                if answer & FRONT and not message.begun:
                    self.position += room - self.position % room
                if answer & ALL != ALL:
                    most = (answer & ALL) - message.begun
            if most:
                start = self.position % room
                count = min(written - self.position, most, room - start)
                memmove(message.address, self._place.ring + start, count)
                self._advance(message, count)
            else:
                self._pass(message)
            self._signals.post(self._taken, self.position)
        return self.position > begun
