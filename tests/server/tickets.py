"""Reading one ticket as a route does."""

from kestrel.runtime import Delta, Finished
from kestrel.server.worker import Ticket, events_of


async def next_event(ticket: Ticket) -> Delta | Finished:
    """The next piece of the only answer to a request."""
    _, event = await anext(events_of([ticket]))
    return event
