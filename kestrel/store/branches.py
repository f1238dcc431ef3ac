"""Where a namespace goes on behind pages that another one holds: a tenant behind a prefix that all tenants share."""

from collections.abc import Iterable

from kestrel.identity import Namespace, branch_key
from kestrel.store.catalog import PageRow


def find_trunk(page: PageRow, ending: Iterable[PageRow]) -> PageRow | None:
    """The page of another namespace that `page` continues, among those that end where it begins; None if none does."""
    namespace = Namespace(page.namespace)
    for other in ending:
        if other.namespace != page.namespace and branch_key(other.key, namespace) == page.parent:
            return other
    return None
