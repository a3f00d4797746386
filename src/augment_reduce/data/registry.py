"""The files of every named dataset: names, checksums, URLs and licences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from augment_reduce.data import arff

MNIST_HOMES = (
    "http://yann.lecun.com/exdb/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
OMNIGLOT_HOME = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/"
MULAN_HOME = "https://raw.githubusercontent.com/tsoumakas/mulan/43f6389095ad71984264db4387a8074b22bc7d4a/data/multi-label/bibtex/"
XML_REPOSITORY = "http://manikvarma.org/downloads/XC/XMLRepository.html"


@dataclass(frozen=True)
class DataFile:
    """One file: its possible names in the dataset's folder (the first is ours), its checksums, its URL.

    `sha256` is of the file, `content_sha256` of its decompressed contents; either suffices. `convert` turns the
    download (with checksum `served_sha256`) into the contents of the file.
    """

    names: tuple[str, ...]
    sha256: str | None = None
    content_sha256: str | None = None
    urls: tuple[str, ...] = ()
    served_sha256: str | None = None
    convert: Callable[..., bytes] | None = None


@dataclass(frozen=True)
class Home:
    """A dataset: its folder, its files by role, its web page and its terms of use."""

    folders: tuple[str, ...]
    files: Mapping[str, DataFile]
    page: str
    terms: str
    advice: str = ""


def _mnist(name: str, sha256: str, content_sha256: str) -> DataFile:
    packed = f"{name}-ubyte.gz"
    urls = tuple(home + packed for home in MNIST_HOMES)
    return DataFile((packed, f"{name}-ubyte", f"{name.replace('-idx', '.idx')}-ubyte"), sha256, content_sha256, urls)


def _bibtex(part: str, sha256: str, content_sha256: str, served_sha256: str) -> DataFile:
    names = (f"bibtex_{part}.txt.gz", f"bibtex_{part}.txt")
    urls = (f"{MULAN_HOME}bibtex-{part}.arff",)
    return DataFile(names, sha256, content_sha256, urls, served_sha256, arff.to_repository_text)


def _xml(part: str, *stems: str) -> DataFile:
    return DataFile(tuple(f"{stem}{part}.txt{suffix}" for stem in ("", *stems) for suffix in ("", ".gz")))


def _packed(name: str, sha256: str, content_sha256: str) -> DataFile:
    return DataFile((f"{name}.gz", name), sha256, content_sha256)


BIBTEX_TRAIN_ARFF = "8dcc9de6e0b2cebaec8c1f4fac78431adeeb73cfd3ab879b530a66d366e59174"
BIBTEX_TEST_ARFF = "9b03329cde64d3f994bdf7fbbac3f3b10fe185c311cb9ae725475f59c7f3f922"

HOMES: dict[str, Home] = {
    "mnist": Home(
        folders=("mnist",),
        files={
            "train-images": _mnist(
                "train-images-idx3",
                "0b367032e93c5d0cea0925647cfdb18614af8ee15f83e6f2fc2ad904a6835971",
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            ),
            "train-labels": _mnist(
                "train-labels-idx1",
                "1787548bbe0bff1ec2ecdc0ef292b02df999e2d1a6002d27500982c652b17203",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            ),
            "test-images": _mnist(
                "t10k-images-idx3",
                "1a1a05eab793c14bb050b398624a11b0ffd1a2953baed553b1b9bd079e2a20be",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            ),
            "test-labels": _mnist(
                "t10k-labels-idx1",
                "b91679a0acfe4ba0e50a2437a903084cba1f5f92592b016a25a7dfd00455798b",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
        },
        page="http://yann.lecun.com/exdb/mnist/",
        terms="LeCun, Cortes and Burges; no licence stated by its home",
    ),
    "omniglot": Home(
        folders=("omniglot",),
        files={
            "prepared": DataFile(
                ("omniglot_28x28.npz",), "b72d3fcd57011b9919c00ddfcf228af858b8d03dbffb8c6bf7a740c1111b6c78"
            ),
            "background": DataFile(
                ("images_background.zip",),
                "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640",
                urls=(f"{OMNIGLOT_HOME}images_background.zip",),
            ),
            "evaluation": DataFile(
                ("images_evaluation.zip",),
                "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee",
                urls=(f"{OMNIGLOT_HOME}images_evaluation.zip",),
            ),
        },
        page="https://github.com/brendenlake/omniglot",
        terms="MIT licence, Brenden Lake",
    ),
    "bibtex": Home(
        folders=("bibtex",),
        files={
            "train": _bibtex(
                "train",
                "8447143bccfeefbf622f25ef812cfd47322b3717b8a3f116717b71f5e8b52bad",
                "b4ea0ea4064004fa7b9a83fba84563ac3cac1971462a3633deb58f5d968f8d54",
                BIBTEX_TRAIN_ARFF,
            ),
            "test": _bibtex(
                "test",
                "5feca86d4ec422364a3e70ef47fb206323d9f8b68cdeb1b4bc322ac3ac132075",
                "8362a26a8a35e23a9da6f271ff4ed077152907cb11ee4646daf34d21cce5b32b",
                BIBTEX_TEST_ARFF,
            ),
            "label-names": DataFile(
                ("label_names.txt",),
                "1350ec51060650137a0d7496560f8c4601c0483d47e291c5a26e3a3968effae4",
                urls=(f"{MULAN_HOME}bibtex-train.arff",),
                served_sha256=BIBTEX_TRAIN_ARFF,
                convert=arff.label_names,
            ),
            "feature-names": DataFile(
                ("feature_names.txt",),
                "228aaf53fef8e30f3042e0f2fe8ec9a19e88e85403e41a8ac53424128c1b6896",
                urls=(f"{MULAN_HOME}bibtex-train.arff",),
                served_sha256=BIBTEX_TRAIN_ARFF,
                convert=arff.feature_names,
            ),
        },
        page="https://github.com/tsoumakas/mulan, folder data/multi-label/bibtex",
        terms="Katakis, Tsoumakas and Vlahavas 2008; no licence stated for the data",
    ),
    "eurlex-4k": Home(
        folders=("eurlex-4k", "eurlex_4k", "Eurlex", "eurlex"),
        files={"train": _xml("train", "eurlex_", "Eurlex_"), "test": _xml("test", "eurlex_", "Eurlex_")},
        page=XML_REPOSITORY,
        terms="see its page",
        advice="On that page take the bag-of-words download of EURLex-4K (5,000 features), unpack it, and take "
        "both its training and its test file.",
    ),
    "amazoncat-13k": Home(
        folders=("amazoncat-13k", "amazoncat_13k", "AmazonCat", "amazoncat"),
        files={"train": _xml("train", "amazonCat_", "amazoncat_"), "test": _xml("test", "amazonCat_", "amazoncat_")},
        page=XML_REPOSITORY,
        terms="see its page",
        advice="On that page take the bag-of-words download of AmazonCat-13K (203,882 features), unpack it, and "
        "take both its training and its test file.",
    ),
    "debian-deps": Home(
        folders=("debian_deps", "debian-deps"),
        files={
            "train": _packed(
                "debian_deps_train.txt",
                "00730ae95cdfc21869b0257f0125f77372089ac4e2cdd9a235918d23ce673c24",
                "891d37f1171fe82387abeda63436af6d6bfb277a4d00ee1c194557bf0b07e729",
            ),
            "test": _packed(
                "debian_deps_test.txt",
                "c5718abc44540ec618b8b896a540674021a391a3761841a889e280dfcfe33516",
                "f15a88e9462d057ff04594484305a9427bf7d42f44845214cc43975c192226d8",
            ),
            "label-names": _packed(
                "label_names.txt",
                "c067956bcaf2437707ca24770ee5d10d12b3e36bb317595c62711216a0fe7c30",
                "2dcec96fcccd7ad3c4d3f6e34677e6e791b73d3240146542f9d8beb6b4b15e3d",
            ),
            "feature-names": _packed(
                "feature_names.txt",
                "6cee6dded343b6e1b66dbf7cbd9ee9d2a75fa6c01c8b424334b56e049fb112f7",
                "b281b8d2575bf239f0a7b7bcb489b368707686430e89a4b3632c9d05c3c76886",
            ),
        },
        page="the package itself, which carries these files",
        terms="made from the package index of Debian 12",
        advice="Install augment-reduce again if they are missing.",
    ),
    "wordnet-glosses": Home(
        folders=("wordnet_glosses", "wordnet-glosses"),
        files={
            "train": _packed(
                "train.txt",
                "ce0cc4ddc6b1febbb3ac239ede4ca0f538ed83d8998cd2114e560d80d03b73bf",
                "4ae0ad1922bd9754c725c5dc60a6ef638aa2839b8e240ace7f8c6d6e02f8be1c",
            ),
            "validation": _packed(
                "valid.txt",
                "31a7a13bd2e956ca180f0848aadf7a686e17217e4482bd91c3cf8feb2b56e93c",
                "2016a20b2134fac13e243dd2e4bf59e8c7f78fdb37f149cd854963645358a149",
            ),
            "test": _packed(
                "test.txt",
                "69eb7612514c02b8d4a67c974c6933c9fbb83c4e50f8c9c2346266567b61f2d8",
                "df64ad5424c1f28d9ce71783b1c394fe9de837680fee1983fd86ea98fb9aad9b",
            ),
        },
        page="https://wordnet.princeton.edu (WordNet 3.0)",
        terms="WordNet 3.0 licence, Princeton University",
        advice="The files hold its glosses, one a line, lower-cased, tokens separated by blanks, split by synset. Your "
        "own text in that form works too, with verify=False.",
    ),
}
