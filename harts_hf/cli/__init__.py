"""The command line: `harts train | plan | verify | bench`."""
