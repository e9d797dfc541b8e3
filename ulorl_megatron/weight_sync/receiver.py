"""A server as the receiving end of weights, beside the requests that the rollout sends it."""

from typing import Dict, List

from ulorl_megatron.rollout.client import Endpoint

_CONTROL_TIMEOUT_S = 60.0
_CHECKSUM_TIMEOUT_S = 600.0


async def server_layout(server: Endpoint) -> Dict[str, object]:
    """tp_size and device, as the server was started. Raises RequestError."""
    info = await server.get("/server_info", timeout_s=_CONTROL_TIMEOUT_S)
    return {"tp_size": int(info["tp_size"]), "device": info["device"]}


async def held_checksums(server: Endpoint) -> List[Dict[str, str]]:
    """Of every tensor-parallel rank: tensor name -> checksum of what it holds. Raises as Endpoint.control."""
    answer = await server.control("/weights_checker", {"action": "checksum"}, _CHECKSUM_TIMEOUT_S)
    return [rank["checksums"] for rank in answer["ranks"]]
