"""What the outside must show of a hostname in each state."""

from operator_app.registration.withdrawal import Declared, Shown, State, shown


def test_a_hostname_that_is_not_declared_is_never_kept_where_the_operator_may_write() -> None:
    """Only paused and orphaned proxies keep one; a registry that fails is tried again until it is withdrawn."""
    gone = (Declared.CHANGED, Declared.REMOVED)
    assert {state for state in State for each in gone if shown(state, each) is Shown.KEPT} == {
        State.PAUSED,
        State.ORPHANED,
    }
    pending = {state for state in State for each in gone if shown(state, each) is Shown.PENDING}
    assert pending == {State.REGISTRY_FAILS, State.ZONE_GONE}


def test_a_declared_hostname_is_kept_where_its_record_still_leads_to_the_proxy_or_nobody_can_tell() -> None:
    """It is withdrawn without a usable address, when another proxy has it, and with the proxy."""
    assert {state for state in State if shown(state, Declared.UNCHANGED) is Shown.WITHDRAWN} == {
        State.NO_ADDRESS,
        State.ADDRESS_UNUSABLE,
        State.CLAIM_TAKEN,
        State.DELETING,
        State.ABANDONED,
    }
