import json

import pytest

from megakv.tracking.config import TrackingConfig


def test_everything_is_off_by_default():
    config = TrackingConfig()
    assert config.model_dump(by_alias=True) == {
        "wandb": {"enabled": False, "project": "megakv", "team": None, "group": None, "name": None},
        "csv": {"enabled": False, "output_path": "runs", "job_name": "megakv"},
        "json": None,
        "timeline": None,
    }


def test_round_trip_through_json():
    section = {"wandb": {"enabled": True, "name": "first"}, "json": "out/report.json", "timeline": "out/t.PNG"}
    config = TrackingConfig(**json.loads(json.dumps(section)))
    assert config.json_path == "out/report.json" and config.wandb.name == "first"
    assert TrackingConfig(**json.loads(json.dumps(config.model_dump(by_alias=True)))) == config


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"wandbb": {}}, "wandbb"),
        ({"json_path": "x.json"}, "json_path"),
        ({"wandb": {"enable": True}}, "wandb.enable"),
        ({"csv": {"path": "x"}}, "csv.path"),
        ({"wandb": {"project": "a/b"}}, "wandb.project"),
        ({"wandb": {"enabled": "perhaps"}}, "wandb.enabled"),
        ({"csv": {"output_path": ""}}, "csv.output_path"),
        ({"timeline": "picture.jpg"}, "allowed: a path that ends in .png"),
    ],
)
def test_wrong_sections_are_refused_by_key(section, named):
    with pytest.raises(ValueError) as refusal:
        TrackingConfig(**section)
    assert named in str(refusal.value)
