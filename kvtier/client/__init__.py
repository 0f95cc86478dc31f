"""What an engine links: caches whose pages it reads and writes in the daemon's memory."""

from kvtier.client.aio import AsyncClient
from kvtier.client.keys import page_keys
from kvtier.client.link import Away
from kvtier.client.sync import Cache, Client, Lease, Path, Region, Reservation, Transfer

__all__ = ["AsyncClient", "Away", "Cache", "Client", "Lease", "Path", "Region", "Reservation", "Transfer", "page_keys"]
