"""What the machine does not give: a line for a person, and only for what is no fault of ours."""

import errno

import numpy as np
import pytest
import torch

from minilm.errors import ConfigError
from minilm.trouble import machine_trouble


def cuda_is_full():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has\n8 GiB")


def mps_is_full():
    raise RuntimeError(
        "MPS backend out of memory (MPS allocated: 1 GiB). Tried to allocate 256 bytes on private pool."
    )


@pytest.mark.parametrize(
    ("ask", "wanted"),
    [
        (lambda: torch.empty(1 << 55), r" \(tried to allocate 144115188075855872 bytes\)"),
        (lambda: np.empty(1 << 57), r" \(unable to allocate 1.00 EiB\)"),
        (lambda: bytearray(1 << 60), ""),
        (cuda_is_full, r" \(tried to allocate 20.00 GiB\)"),
        (mps_is_full, r" \(tried to allocate 256 bytes\)"),
    ],
)
def test_out_of_memory_is_one_line_that_says_what_to_lower(ask, wanted):
    with (
        pytest.raises(
            ConfigError, match=rf"^out of memory{wanted} with batch_size=4: lower it; half is done$"
        ) as caught,
        machine_trouble("batch_size=4: lower it", lambda: "half is done"),
    ):
        ask()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_refuses_is_one_line(number):
    error = OSError(number, "No space left on device")
    with (
        pytest.raises(ConfigError, match=r"^the disk: No space left on device; half is done$"),
        machine_trouble("", lambda: "half is done"),
    ):
        raise error
    with pytest.raises(ConfigError, match=r"^a\.txt: No space left on device$"), machine_trouble(""):
        raise OSError(number, "No space left on device", "a.txt")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), BrokenPipeError(), OSError(), ValueError()],
)
def test_faults_of_ours_stay_what_they_are(error):
    with pytest.raises(type(error)) as caught, machine_trouble(""):
        raise error
    assert caught.value is error
