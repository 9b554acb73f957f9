//! What is said of real programs.

use std::path::Path;
use std::process::Command;

use shunt_run::explain::{Coverage, INTERPOSED, NEEDS_NONE, explain};

#[test]
fn nginx_is_covered() {
    let explained = explain(Path::new("/usr/sbin/nginx")).unwrap();
    let Coverage::Calls(calls) = &explained.coverage else { panic!("{explained}") };
    for call in ["recv", "writev", "sendfile64", "accept4", "connect"] {
        assert!(calls.iter().any(|known| known == call), "{call} is not in {explained}");
    }
}

#[test]
fn a_static_program_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (dir.path().join("static.c"), dir.path().join("static"));
    std::fs::write(&source, "int main(void) { return 0; }").unwrap();
    let built = Command::new("gcc").args(["-static", "-o"]).arg(&program).arg(&source).status().unwrap();
    assert!(built.success());
    assert!(matches!(explain(&program).unwrap().coverage, Coverage::None(why) if why.contains("static")));
}

#[test]
fn a_setuid_program_is_not_and_a_script_is_an_error() {
    assert!(
        matches!(explain(Path::new("/usr/bin/su")).unwrap().coverage, Coverage::None(why) if why.contains("setuid"))
    );
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("script");
    std::fs::write(&script, "#!/bin/sh\n").unwrap();
    assert!(explain(&script).unwrap_err().to_string().contains("interpreter"));
}

/// The list that is shown is the list that there is.
#[test]
fn each_call_that_is_said_to_be_interposed_is() {
    let own = std::env::current_exe().unwrap();
    let library = own.ancestors().nth(2).unwrap().join(shunt_run::launch::LIBRARY);
    let bytes = std::fs::read(&library).unwrap_or_else(|error| panic!("{}: {error}", library.display()));
    let file = object::File::parse(&*bytes).unwrap();
    let exported: Vec<String> = object::Object::exports(&file)
        .unwrap()
        .iter()
        .map(|export| String::from_utf8_lossy(export.name()).into_owned())
        .collect();
    for call in INTERPOSED.iter().filter(|call| !NEEDS_NONE.contains(call)) {
        assert!(exported.iter().any(|name| name == call), "{call} is not exported");
    }
    for name in &exported {
        assert!(INTERPOSED.contains(&name.as_str()) || name.starts_with("rust_"), "{name} is exported and not listed");
    }
}
