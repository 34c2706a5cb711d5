"""Turn a device argument, a name or a torch.device, into a torch.device."""

import torch

from halley.core.field_types import check_choice, show


def parse_device(
    device: object, *, types: tuple[str, ...] = ("cpu", "cuda"), name: str = "device"
) -> torch.device:
    """Return a device given by name or as a ``torch.device``.

    Args:
        types: allowed device types.
        name: name of the argument in messages.

    Raises:
        ValueError: it is neither, torch does not know the device, or its type is not allowed.
    """
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError as error:
            rule = f"a device of type {' or '.join(types)}"
            raise ValueError(f"{name} ({show(device)}) must be {rule}") from error
    if not isinstance(device, torch.device):
        raise ValueError(f"{name} ({show(device)}) must be a torch.device or its name")
    check_choice(device.type, types, name=name)
    return device
