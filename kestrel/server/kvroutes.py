"""The routes about stored KV: what there is, what a prompt would find, keeping it and letting go of it."""

from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool

from kestrel.cache.purge import purge_session
from kestrel.errors import RequestError
from kestrel.identity import as_tokens
from kestrel.server import wire
from kestrel.server.refusals import UnknownPage
from kestrel.server.site import Site, caller_of
from kestrel.server.warming import find_state
from kestrel.store.store import PageRow, Store

PageKey = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="A page's key, 32 hex digits.")]


def kv_routes(site: Site) -> APIRouter:
    """The routes over one server."""
    routes = APIRouter(tags=["Kestrel"])
    runtime = site.runtime

    def open_store() -> Store:
        if runtime.store is None:
            raise RequestError("the store is switched off (cache.enabled=false)")
        return runtime.store

    @routes.get("/v1/kv")
    def list_pages(
        http: HttpRequest,
        after: Annotated[int, Query(ge=0, description="Skip so many: `next` of the answer before.")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        everyone: Annotated[bool, Query(description="Pages of all namespaces (admin keys only).")] = False,
    ) -> wire.PageList:
        """The caller's stored pages, most recently used first."""
        scope = site.scope_of(http) or runtime.cache.common
        all_too = everyone and caller_of(http).is_admin
        rows = open_store().list_pages(None if all_too else scope.namespace.digest)
        shown = rows[after : after + limit]
        end = after + len(shown)
        return wire.PageList(
            data=[_stored_page(row) for row in shown],
            total=len(rows),
            next=end if end < len(rows) else None,
        )

    @routes.post("/v1/kv/find")
    async def find(body: wire.FindRequest, http: HttpRequest) -> wire.Found:
        """What a prompt would find, without running it."""
        if body.prompt is not None:
            tokens = await site.tokens_of_prompt(body.prompt)
        else:
            tokens = await site.tokens_of_chat(body)
        runtime.check(tokens)
        scope = site.scope_of(http)
        match = await run_in_threadpool(runtime.find, tokens, scope)
        array = as_tokens(tokens)
        in_ram = runtime.cache.find_in_ram(array, runtime.cache.course(array, scope))
        num_in_ram = sum(rows for _, rows in in_ram)
        return wire.Found(
            prompt_tokens=len(tokens),
            stored_tokens=match.num_tokens,
            ram_tokens=num_in_ram,
            computed_tokens=len(tokens) - max(match.num_tokens, num_in_ram),
            miss_reason=match.reason,
            diverged_at=match.diverged_at,
            pages=[
                wire.FoundPage(
                    key=ref.key.hex(),
                    first=ref.first,
                    num_tokens=ref.num_tokens,
                    num_used=ref.num_used,
                    bytes=ref.nbytes,
                )
                for ref in match.pages
            ],
        )

    @routes.get("/v1/kv/prefixes")
    def list_prefixes() -> wire.PrefixList:
        """The prefixes of the configuration, and how much of each is stored now."""
        return wire.PrefixList(data=[find_state(prefix, runtime) for prefix in site.prefixes])

    @routes.post("/v1/kv/purge")
    def purge(body: wire.PageRequest, http: HttpRequest) -> wire.Changed:
        """Forget a session: its pages in memory and on disk, later turns included.

        Pages before it that other sessions continue too, or that belong to a configured prefix, stay; so do those
        that requests of other sessions are using. A running request of this session is answered to its end, and what
        it computes is forgotten; one that still waits begins anew.
        """
        scope = site.scope_of(http) or runtime.cache.common
        purged = purge_session(runtime.cache, scope, bytes.fromhex(body.key))
        return wire.Changed(changed=purged.removed, kept=purged.kept)

    @routes.post("/v1/kv/pin")
    def pin(body: wire.PageRequest) -> wire.Changed:
        """Keep a page, and thereby those before it, from being evicted (admin)."""
        key = _known(open_store(), body.key).key
        return wire.Changed(changed=open_store().pin([key]))

    @routes.post("/v1/kv/unpin")
    def unpin(body: wire.PageRequest) -> wire.Changed:
        """Let a page be evicted again (admin)."""
        key = _known(open_store(), body.key).key
        return wire.Changed(changed=open_store().unpin([key]))

    @routes.delete("/v1/kv/{key}")
    def delete(key: PageKey) -> wire.Changed:
        """Remove a page that no other page continues, from disk and from memory (admin)."""
        store = open_store()
        page = _known(store, key)
        runtime.engine.pool.forget([page.key])
        removed = len(store.remove([page]))
        return wire.Changed(changed=removed, kept=1 - removed)

    return routes


def _known(store: Store, key: str) -> PageRow:
    row = store.find_row(bytes.fromhex(key))
    if row is None:
        raise UnknownPage(f"there is no page {key} in the store; GET /v1/kv lists them")
    return row


def _stored_page(row: PageRow) -> wire.StoredPage:
    return wire.StoredPage(
        key=row.key.hex(),
        parent=row.parent.hex(),
        namespace=row.namespace.hex(),
        first=row.first,
        num_tokens=row.num_tokens,
        bytes=row.nbytes,
        created=row.created,
        last_used=row.last_used,
        hits=row.hits,
        num_children=row.num_children,
        pinned=row.pinned,
    )
