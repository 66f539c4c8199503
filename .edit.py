from pathlib import Path
ROOT=Path("/work/wt/tasks/src/trustbatch")
def edit(name, *pairs):
    p=ROOT/name; s=p.read_text()
    for a,b in pairs:
        assert s.count(a)==1,(name,a,s.count(a)); s=s.replace(a,b)
    p.write_text(s)
edit("tasks/__init__.py",("        task = make\n","        task: Any = make\n"))
edit("tasks/hub.py",('''            # the bases are the errors of the HTTP library, which is another in other versions
            except HfHubHTTPError.__bases__ as error:
''','''            except failures as error:
'''),('''        pattern = self.files[split]
''','''        # the bases are the errors of the HTTP library, which is another in other versions
        failures = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)
        pattern = self.files[split]
'''),("from pathlib import Path\n","from pathlib import Path\nfrom typing import cast\n"))
edit("tasks/curriculum.py",('''                f"task.curriculum is for tasks with an end, and {self.task.name} has none: remove it."
''','''                f"task.curriculum is for tasks with an end, and {self.task.name} has none: remove "
                "it."
'''))
edit("tasks/problems.py",('''            raise ValueError(f"The filters of [task] leave nothing ({self.describe()}): widen them.")
''','''            raise ValueError(f"The filters leave nothing of {self.describe()}: widen them.")
'''))
