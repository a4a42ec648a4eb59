"""The zone registry: every name finds its zone, and no name two."""

import pytest

from carbon_feed.settings import CarbonFeedSettings
from carbon_feed.zones import load_zones, provider_zone, zone_of
from trefoil.core import errors


@pytest.mark.parametrize(
    ("name", "zone"),
    [
        ("GB", "GB"),
        ("uk", "GB"),
        ("AUS-NSW", "AU-NSW"),
        ("CAISO_NORTH", "US-CAL-CISO"),
        ("CISO", "US-CAL-CISO"),
        ("aws/us-west-1", "US-CAL-CISO"),
        ("gcp/europe-west1", "BE"),
        ("eu-west-2", "GB"),
        ("GB-13", "GB-13"),
    ],
)
def test_a_zone_is_found_by_any_of_its_names(name, zone):
    assert load_zones().find(name).id == zone


def test_no_name_is_that_of_two_zones():
    names = [
        name.lower()
        for zone in load_zones()
        for name in {zone.id, *zone.aliases, zone.electricity_maps, zone.watttime, *zone.clouds}
        if name
    ]
    assert sorted(names) == sorted(set(names))


def test_every_region_of_neso_is_there():
    regions = {zone.neso for zone in load_zones() if zone.neso}
    assert regions == {"national", *(str(number) for number in range(1, 18))}


def test_an_unknown_zone_names_near_ones():
    with pytest.raises(errors.NotFound, match=r"US-CAL-CISO.*zones_file"):
        load_zones().find("US-NOWHERE")
    assert zone_of(CarbonFeedSettings(zone="demo")) is None, "a name of one's own is allowed"


def test_a_file_of_ones_own_adds_and_wins(tmp_path):
    own = tmp_path / "zones.toml"
    own.write_text('[GB]\nname = "ours"\n[site-7]\nname = "Site 7"\nelectricity_maps = "DE"\nclouds = ["aws/x"]\n')
    settings = CarbonFeedSettings(zone="site-7", zones_file=own)
    assert provider_zone(settings, "electricity_maps", "electricity_maps.zone") == "DE"
    assert load_zones(own).find("GB").name == "ours"
    assert load_zones(own).find("FR").id == "FR"
    with pytest.raises(errors.SettingError, match=r"watttime has no name.*set watttime.region"):
        provider_zone(settings, "watttime", "watttime.region")


def test_a_region_of_two_clouds_in_two_zones_needs_its_clouds_name(tmp_path):
    own = tmp_path / "zones.toml"
    own.write_text('[one]\nname = "1"\nclouds = ["aws/north"]\n[two]\nname = "2"\nclouds = ["azure/north"]\n')
    assert load_zones(own).find("azure/north").id == "two"
    assert load_zones(own).get("north") is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[x", "not valid TOML"),
        ('[x]\nname = "x"\ntimezone = "Mars/Olympus"', "timezone.*no such time zone"),
        ('[x]\nname = "x"\ntimezone = "Europe"', "timezone.*no such time zone"),
        ('[x]\nname = "x"\nclouds = ["nimbus/1"]', "clouds.*provider/region"),
        ('[x]\nname = "x"\ncolour = "red"', "colour: unknown setting"),
        ("[x]", "name: missing"),
    ],
)
def test_a_bad_file_is_refused_by_field(tmp_path, text, named):
    own = tmp_path / "zones.toml"
    own.write_text(text)
    with pytest.raises(errors.SettingError, match=named):
        load_zones(own)
    with pytest.raises(errors.SettingError, match="cannot be read"):
        load_zones(tmp_path / "absent.toml")
