"""Handwritten digits that come with scikit-learn: 1,797 real images, no download. This is not MNIST.

Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
1998 (its test part), 8×8 pixels with 17 levels of grey.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from parallelbench.config.components import Arrays, Data
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SAMPLES = 1797
TEST_SAMPLES = 355
"""Every fifth image of each digit, of 174 to 183 images per digit."""
SOURCE_SIZE = 8
SOURCE_LEVELS = 16
"""The brightest level; black is 0."""


class Digits(Data, frozen=True, kw_only=True):
    """scikit-learn's handwritten digits, resized.

    The split is fixed and stratified: of each digit, in the order of the file, every fifth image is a test
    image. `mean` and `std` are those of the training images at `image_size` 28.
    """

    mean: ClassVar[tuple[float, ...]] = (0.3051,)
    std: ClassVar[tuple[float, ...]] = (0.3248,)
    flip: ClassVar[bool] = False

    image_size: Annotated[int, Meta(ge=8, le=256)]
    """Height and width in pixels after bilinear resizing from 8×8."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return 1, self.image_size, self.image_size

    @property
    def num_classes(self) -> int:
        """Ten digits."""
        return 10

    @property
    def train_samples(self) -> int:
        """Training samples in one epoch."""
        return SAMPLES - TEST_SAMPLES

    @property
    def test_samples(self) -> int:
        """Test samples; each is evaluated exactly once."""
        return TEST_SAMPLES

    def missing_files(self, data_dir: Path) -> list[Path]:
        """Always empty: the images are part of scikit-learn."""
        return []

    def load(self, data_dir: Path) -> Arrays:
        """Read scikit-learn's file (without importing scikit-learn) and resize; takes some 20 ms."""
        import numpy as np

        path = _source()
        table = np.loadtxt(path, delimiter=",", dtype=np.int64)
        if table.shape != (SAMPLES, SOURCE_SIZE**2 + 1):
            raise ConfigError(f"{path} has shape {table.shape}: install scikit-learn>=1.5 again")
        labels = table[:, -1]
        images = resize(table[:, :-1].reshape(-1, SOURCE_SIZE, SOURCE_SIZE), size=self.image_size)[:, np.newaxis]
        test = np.zeros(SAMPLES, dtype=bool)
        for digit in range(10):
            test[np.flatnonzero(labels == digit)[4::5]] = True
        return Arrays(
            train_images=images[~test],
            train_labels=labels[~test],
            test_images=images[test],
            test_labels=labels[test],
        )


def _source() -> Path:
    spec = importlib.util.find_spec("sklearn")  # finds the package without running it
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return path
    raise ConfigError("data=digits needs scikit-learn's digits.csv.gz: pip install 'scikit-learn>=1.5'")


def resize(images: NDArray[np.int64], *, size: int) -> NDArray[np.uint8]:
    """Resize (n, 8, 8) of levels 0 … 16 to (n, size, size) of 0 … 255, bilinear with half-pixel centres.

    The weights are whole numbers below 2**53 held in float64, so every product and sum is exact and all
    machines get the same bytes; the one rounding is half up.
    """
    import numpy as np

    weights = np.zeros((size, SOURCE_SIZE))  # times 2·size
    for row in range(size):
        position = SOURCE_SIZE * (2 * row + 1) - size
        low, fraction = divmod(position, 2 * size)
        weights[row, max(low, 0)] += 2 * size - fraction
        weights[row, min(low + 1, SOURCE_SIZE - 1)] += fraction
    levels = (weights @ images.astype(np.float64) @ weights.T).astype(np.int64)
    whole = SOURCE_LEVELS * (2 * size) ** 2
    return ((2 * 255 * levels + whole) // (2 * whole)).astype(np.uint8)
