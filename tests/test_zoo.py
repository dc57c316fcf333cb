"""The catalogue is complete for the installed frontend, and each case is about the node type that it names."""

import pytest
from zoo import ZOO, uncovered

pytest.importorskip("cudnn")


def test_every_node_type_with_a_builder_has_a_case():
    assert uncovered() == set()


@pytest.mark.parametrize("name", ZOO)
def test_case_describes_its_node_type(name):
    case = ZOO[name]
    assert case.node_type in {node.node_type.name for node in case.make().nodes}


def test_case_names_are_unique():
    assert [case.name for case in ZOO.values()] == list(ZOO)
