"""Tables of a training run: its plan and its end."""

from dataclasses import replace

from tests.lab.runs.made_run import make_end, make_plan
from thinpipe.lab.records import report
from thinpipe.lab.runs.run_tables import end_tables, plan_tables


def test_the_plan_shows_stages_and_traffic():
    held, links = (report.plain_text(table) for table in plan_tables(make_plan()))
    assert "1      1          1-18 Stem to Residual   2,222,944  99.4%" in held
    assert "2      0, client  19 Head                    12,810   0.6%" in held
    assert "1 to 2  forward    sort:6+2   8x320x2x2    327.7   82.2  0.251" in links
    assert "2 to 1  backward   sort:6+2   8x320x2x2    327.7   82.2  0.251" in links


def test_the_plan_shows_the_bytes_of_the_first_steps():
    plan = make_plan()
    first, *rest = plan.links
    learned = {"wire_bytes": 65_536, "first_wire_bytes": 262_144, "first_steps": 35, "learned_bytes": 1000}
    axes = replace(first, spec="axes:2", **learned)
    links = report.plain_text(plan_tables(replace(plan, links=(axes, *rest)))[1])
    assert "axes:2: 262.1 kB a step forward in the first 35 steps, 65.5 kB after that, of which 1.0 kB are" in links


def test_the_plan_notes_that_masks_may_need_less():
    plan = make_plan()
    first, *rest = plan.links
    links = report.plain_text(plan_tables(replace(plan, links=(replace(first, integer_bytes=8200), *rest)))[1])
    assert "At most: 8.2 kB of it are masks or other integers, sent in as few bits as they need." in links
    assert "At most" not in report.plain_text(plan_tables(plan)[1])


def test_the_plan_names_gradients_that_are_not_needed() -> None:
    plan = make_plan()
    assert "trained" not in "".join(report.plain_text(table) for table in plan_tables(plan))
    client, *rest = plan.holdings
    silent = tuple(link for link in plan.links if (link.source, link.target) != (1, 0))
    frozen = replace(
        plan, trained=plan.trained - client.trained, holdings=(replace(client, trained=0), *rest), links=silent
    )
    held, links = (report.plain_text(table) for table in plan_tables(frozen))
    assert "2,236,682 parameters, 2,235,754 of them trained" in held
    assert "No gradients from stage 1 to 0: nothing that they would reach is trained." in links


def test_the_end_shows_the_time_of_each_part():
    result, links, times = (report.plain_text(table) for table in end_tables(make_plan(), make_end(), 12 * 689152))
    assert "digits     86.7%  87.1%      0.3330  0.4000        802      3.9     689,152" in result
    assert "all     backward              1376.3  344.6  0.250" in links
    # The client encodes what leaves stages 0 and 2, and waits for what comes to them: 10 ms per target's number.
    assert "0, client     20.0     4.0  20.0       1.0     2.0   410" in times
    assert "1             50.0     4.0  20.0       1.0     2.0   411" in times
