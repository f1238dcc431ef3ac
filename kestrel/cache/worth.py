"""Whether a hit on disk is worth reading: what this process measured of its own steps and reads decides.

A fast model on a slow disk computes a prefix sooner than it reads it. Two rates are kept: seconds a prompt token
takes to compute (one part that is the same for every token, one that grows with the tokens before it) and seconds a
byte takes to read. A new process goes by a few rows that it computed at its start, knows nothing of the disk, and
reads: a read that turns out slower than computing is given up soon after it began (`is_too_slow`), which costs a few
per cent.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kestrel.store.match import PageRef

GUESSED_READ_BYTES = 200e6  # a second: between an SD card and a disk
LEAST_ROWS = 64  # steps of fewer rows say little about a long prompt
LEAST_READ_NBYTES = 128 * 1024  # shorter: mostly opening files, or waiting for a disk that was asleep
LEAST_SECONDS = 0.25  # where neither choice takes longer, the hit is read: nobody feels the difference
LEAST_LOSS = 0.1  # seconds by which reading must be slower than computing before a read is given up
TRIAL = 0.02  # of the computing time: how long a read may go on before it is judged
LEAST_TRIAL = 0.065  # seconds that a read goes on in any case
KEPT = 0.5  # weight of everything measured before, when something new is
FORGIVING = 0.97  # factor on the remembered cost of reading after each refusal, so that a recovered disk is tried again


@dataclass(frozen=True)
class Choice:
    """What to do with the pages a match found on disk: read the first `num_pages`, compute what follows.

    Estimated seconds until the whole prompt is computed: `seconds` this way, `computing` without reading;
    `afterwards` is the part of `seconds` that begins when everything is read.
    """

    num_pages: int
    num_pages_found: int
    seconds: float
    afterwards: float
    computing: float
    why: str

    def __str__(self) -> str:
        """The decision in words."""
        part = "read in part" if self.num_pages else "not read"
        what = "read" if self.num_pages == self.num_pages_found else part
        return f"{what}, {self.why}: about {self.seconds * 1e3:.0f} ms, computing all {self.computing * 1e3:.0f} ms"


class Worth:
    """Running estimates of one process, and the decisions they lead to. Thread-safe."""

    def __init__(
        self,
        flops_per_token: float,
        flops_per_key: float,
        flops: float,
        chunk_tokens: int,
        always: bool = False,
    ):
        """flops_per_token: of all matrices; flops_per_key: of attention, for one token and one token before it.

        flops: operations a second, to begin with. chunk_tokens: most rows of the step that a read overlaps with.
        always: read whatever is found.
        """
        self._lock = threading.Lock()
        self._always = always
        self._chunk = chunk_tokens
        self._per_token = _Rate(flops_per_token / flops)
        self._per_key = _Rate(flops_per_key / flops)
        self._per_byte = _Rate(1 / GUESSED_READ_BYTES)

    def note_step(self, rows: int, keys: int, matrices: float, attention: float) -> None:
        """Learn from a step: rows, the tokens all of them attended to, seconds in matrix products and attention."""
        if rows >= LEAST_ROWS:
            with self._lock:
                self._per_token.add(rows, matrices)
                self._per_key.add(keys, attention)

    def note_read(self, nbytes: int, seconds: float) -> None:
        """Learn from a restore, ended or given up."""
        if nbytes >= LEAST_READ_NBYTES:
            with self._lock:
                self._per_byte.add(nbytes, seconds)

    def computing_seconds(self, first: int, end: int) -> float:
        """Estimated seconds to compute positions [first, end)."""
        keys = (end * (end + 1) - first * (first + 1)) / 2
        with self._lock:
            return (end - first) * self._per_token.value + keys * self._per_key.value

    def reading_seconds(self, nbytes: int) -> float:
        """Estimated seconds to read so many bytes of artifacts."""
        with self._lock:
            return nbytes * self._per_byte.value

    def choose(self, pages: Sequence[PageRef], num_known: int, num_tokens: int) -> Choice:
        """How many of `pages`, in order, to read for a prompt of `num_tokens`.

        num_known: tokens that need no reading, because memory holds them. Of the choices that take no longer than
        computing the one that is done first is taken, of equal ones the longest.
        """
        computing = self.computing_seconds(num_known, num_tokens)
        seconds, afterwards = [computing], [computing]  # by number of pages read
        nbytes = 0
        for page in pages:
            nbytes += page.nbytes
            end = page.first + page.num_used
            overlapped = min(end + self._chunk, num_tokens)  # the step that waits for the read layer by layer
            busy = max(self.reading_seconds(nbytes), self.computing_seconds(end, overlapped))
            afterwards.append(self.computing_seconds(overlapped, num_tokens))
            seconds.append(busy + afterwards[-1])
        number, why = len(pages), "estimated"
        if self._always:
            why = "as cache.load=always demands"
        elif max(computing, self.reading_seconds(nbytes)) < LEAST_SECONDS:
            why = "because it is short"
        elif not self._per_byte.is_measured:
            why = "because no read was measured yet"
        else:
            useful = [n for n, page in enumerate(pages, 1) if page.first + page.num_used > num_known]
            number = min(reversed([0, *useful]), key=seconds.__getitem__)
            if not number and pages:
                with self._lock:
                    self._per_byte.soften(FORGIVING)
        return Choice(number, len(pages), seconds[number], afterwards[number], computing, why)

    def is_too_slow(self, choice: Choice, elapsed: float, nbytes: int, num_bytes: int) -> bool:
        """Whether a read that has brought `nbytes` of `num_bytes` in `elapsed` seconds should be given up.

        Judged once it has taken TRIAL of the time that computing would, and LEAST_TRIAL: if the rest of it, at the
        speed so far, and what must be computed afterwards take longer than computing everything, the loss is that
        small share. A few bytes say nothing of a disk until they have taken long: it may have been asleep. elapsed:
        without the time that the reader waited for a core, which says nothing of the disk.
        """
        if self._always or elapsed < max(TRIAL * choice.computing, LEAST_TRIAL):
            return False
        if nbytes < LEAST_READ_NBYTES and elapsed < LEAST_SECONDS:
            return False
        gained = choice.computing - choice.afterwards + LEAST_LOSS
        return (num_bytes - nbytes) * elapsed > gained * nbytes


class _Rate:
    """Seconds for one unit: a guess until something is measured, then a mean that forgets."""

    def __init__(self, guess: float) -> None:
        self.value = guess
        self.is_measured = False
        self._units = 0.0
        self._seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        """Take a measurement of so many units."""
        self._units = self._units * KEPT + units
        self._seconds = self._seconds * KEPT + seconds
        self.value = self._seconds / self._units
        self.is_measured = True

    def soften(self, factor: float) -> None:
        """Remember it as cheaper than it was."""
        self._seconds *= factor
        self.value *= factor
