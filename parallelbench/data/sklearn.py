"""Data sets that come with scikit-learn, without a download: handwritten digits (not MNIST), and tumours.

Digits: 1,797 real images of 8×8 pixels with 17 levels of grey. E. Alpaydin, C. Kaynak, Optical Recognition of
Handwritten Digits, UCI Machine Learning Repository, 1998 (its test part). Tumours: 569 vectors of 30 measurements of
cell nuclei. W. Wolberg, O. Mangasarian, N. Street, W. Street, Breast Cancer Wisconsin (Diagnostic), UCI Machine
Learning Repository, 1995.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta

from parallelbench.config.components import Arrays, Data, Kind
from parallelbench.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


DIGITS = 1797
TEST_DIGITS = 355
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

    num_classes: ClassVar[int] = 10
    train_samples: ClassVar[int] = DIGITS - TEST_DIGITS
    test_samples: ClassVar[int] = TEST_DIGITS

    image_size: Annotated[int, Meta(ge=8, le=256)]
    """Height and width in pixels after bilinear resizing from 8×8."""

    @property
    def shape(self) -> tuple[int, int, int]:
        return 1, self.image_size, self.image_size

    def load(self, data_dir: Path) -> Arrays:
        """Read scikit-learn's file (without importing scikit-learn) and resize; takes some 20 ms."""
        import numpy as np

        table = _table("digits.csv.gz", (DIGITS, SOURCE_SIZE**2 + 1)).astype(np.int64)
        images = resize(table[:, :-1].reshape(-1, SOURCE_SIZE, SOURCE_SIZE), size=self.image_size)[:, np.newaxis]
        return _stratified(images, table[:, -1])


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


TUMOURS, FEATURES = 569, 30
TEST_TUMOURS = 113
"""Every fifth tumour of each class, of 212 malignant (0) and 357 benign ones (1)."""


class BreastCancer(Data, frozen=True, kw_only=True):
    """scikit-learn's tumours; `mean` and `std` are those of the training samples.

    The split is fixed and stratified: of each class, in the order of the file, every fifth sample is a test sample.
    """

    mean: ClassVar[tuple[float, ...]] = (
        *(14.13, 19.35, 91.99, 655.1, 0.09671, 0.1047, 0.08844, 0.04913, 0.182, 0.06289),
        *(0.4049, 1.212, 2.862, 40.43, 0.007076, 0.02547, 0.03114, 0.01181, 0.02062, 0.003804),
        *(16.3, 25.79, 107.5, 884.7, 0.1331, 0.2558, 0.2726, 0.1157, 0.2921, 0.08427),
    )
    std: ClassVar[tuple[float, ...]] = (
        *(3.515, 4.267, 24.24, 352.9, 0.01461, 0.05307, 0.07914, 0.0389, 0.02823, 0.007074),
        *(0.2833, 0.5242, 2.079, 47.65, 0.003148, 0.01811, 0.02635, 0.00593, 0.008658, 0.002511),
        *(4.851, 6.109, 33.68, 575.8, 0.02352, 0.1573, 0.2088, 0.06637, 0.06429, 0.01771),
    )
    flip: ClassVar[bool] = False
    kind: ClassVar[Kind] = "vectors"
    shape: ClassVar[tuple[int, ...]] = (FEATURES,)
    num_classes: ClassVar[int] = 2
    train_samples: ClassVar[int] = TUMOURS - TEST_TUMOURS
    test_samples: ClassVar[int] = TEST_TUMOURS

    def load(self, data_dir: Path) -> Arrays:
        """Read scikit-learn's file, without importing scikit-learn."""
        import numpy as np

        table = _table("breast_cancer.csv", (TUMOURS, FEATURES + 1), skiprows=1)
        return _stratified(table[:, :-1].astype(np.float32), table[:, -1].astype(np.int64))


def _table(name: str, shape: tuple[int, int], *, skiprows: int = 0) -> NDArray[np.float64]:
    """A file of scikit-learn, whose package is found without being run."""
    import numpy as np

    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (path := Path(folder, "datasets", "data", name)).is_file():
            table = np.loadtxt(path, delimiter=",", skiprows=skiprows)
            if table.shape == shape:
                return table
    raise ConfigError(f"scikit-learn's {name} is missing, or holds another table: pip install 'scikit-learn>=1.5'")


def _stratified(samples: NDArray[Any], labels: NDArray[np.int64]) -> Arrays:
    """Every fifth sample of each class, in the order of the file, is for testing."""
    import numpy as np

    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        test[np.flatnonzero(labels == label)[4::5]] = True
    return Arrays(samples[~test], labels[~test], samples[test], labels[test])
