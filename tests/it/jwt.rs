//! Identities from JWTs, tested over the wire: accepted tokens, rejected tokens and key rotation.

use std::path::Path;

use crate::support::client::{Client, Reply};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::tokens::{Key, encode, hs256, in_seconds, key_set, signed};
use serde_json::{Value, json};

const ISSUER: &str = "https://issuer.example";

/// A configuration with two limits on `/limited`: one by the claim `sub`, one global.
fn config(jwt: &str, limit: &str) -> String {
    let fixed = "algorithm = \"fixed-window\"\nstart = \"first-request\"\nquota = \"1000/hour\"";
    format!(
        "[auth.tokens]\nkind = \"jwt\"\n{jwt}\n[limit.token]\nby = \"jwt:sub\"\n{fixed}\n{limit}\n[limit.all]\nby = \"global\"\n{fixed}\n\
         [[route]]\nname = \"limited\"\npath = \"/limited\"\nidentify = [\"tokens\"]\nlimits = [\"token\", \"all\"]\nrespond = {{ status = 200 }}\n"
    )
}

/// Start a gateway that trusts `keys` and requires the issuer and the audience of the tests.
fn strict(keys: &[&Key]) -> Gateway {
    let jwt = format!("jwks_file = \"jwks.json\"\nissuer = \"{ISSUER}\"\naudience = \"api\"");
    Gateway::start_with(&config(&jwt, ""), &[("jwks.json", &key_set(keys))])
}

/// Return the claims of a token that `strict` accepts, with the changes in `other`.
fn claims(sub: &str, other: Value) -> Value {
    let mut claims = json!({ "sub": sub, "exp": in_seconds(300), "iss": ISSUER, "aud": "api" });
    let Value::Object(other) = other else { panic!("{other} is not an object of claims") };
    for (name, value) in other {
        match value {
            Value::Null => claims.as_object_mut().unwrap().remove(&name),
            value => claims.as_object_mut().unwrap().insert(name, value),
        };
    }
    claims
}

fn get(client: &mut Client, token: &str) -> Reply {
    client.get_with("/limited", &[("Authorization", &format!("Bearer {token}"))])
}

/// Return the remaining quota of the limit by subject and of the global limit.
fn remaining(reply: &Reply) -> (u64, u64) {
    assert_eq!(reply.status, 200, "{}", reply.text());
    (reply.remaining("token"), reply.remaining("all"))
}

/// Assert that the response is a 401 as in RFC 6750 §3 and repeats neither the token nor its claims.
fn assert_invalid(reply: &Reply, detail: &str, token: &str, what: &str) {
    reply.assert_problem(401, what);
    assert_eq!(reply.header("www-authenticate"), Some("Bearer error=\"invalid_token\""), "{what}");
    let text = reply.text();
    assert!(text.contains(detail), "{what}: {text}");
    for part in token.split('.').filter(|part| part.len() > 3) {
        assert!(!text.contains(part), "{what}: the response contains a part of the token: {text}");
    }
}

#[test]
fn each_jwt_algorithm_is_accepted_and_each_subject_has_a_bucket() {
    let keys = [Key::rsa("rsa"), Key::ec("ec"), Key::ed("ed")];
    let gateway = strict(&keys.each_ref());
    let mut client = gateway.client();
    for (index, key) in keys.iter().enumerate() {
        let alice = key.token(&claims("alice", json!({ "jti": index, "aud": ["other", "api"] })));
        let own = key.token(&claims(&key.id, json!({ "nbf": in_seconds(-1) })));
        let index = index as u64;
        assert_eq!(
            remaining(&get(&mut client, &alice)),
            (999 - index, 999 - 2 * index),
            "{}: tokens of alice share one bucket",
            key.id
        );
        assert_eq!(
            remaining(&get(&mut client, &own)),
            (999, 998 - 2 * index),
            "{}: another subject has another bucket",
            key.id
        );
    }
    // The scheme is case-insensitive. A token without `kid` is verified with the only key of its algorithm.
    for (line, head) in [
        ("bearer ", json!({ "alg": "EdDSA", "kid": "ed" })),
        ("BEARER  ", json!({ "alg": "EdDSA" })),
        ("Bearer ", json!({ "alg": "EdDSA", "typ": "at+jwt", "jku": "https://evil.example/jwks.json" })),
    ] {
        let token = keys[2].token_with(&head, &claims("bob", json!({})));
        let reply = client.get_with("/limited", &[("authorization", &format!("{line}{token}"))]);
        assert_eq!(reply.status, 200, "{line}{head}: {}", reply.text());
    }
    assert_eq!(
        remaining(&get(&mut client, &keys[0].token(&claims("bob", json!({}))))).0,
        996,
        "the three tokens above belong to bob as well"
    );
}

#[test]
fn invalid_tokens_are_rejected_and_never_charged() {
    let (rsa, ec, ed) = (Key::rsa("rsa"), Key::ec("ec"), Key::ed("ed"));
    let (other_rsa, other_ed, second_rsa) = (Key::rsa("rsa"), Key::ed("ed"), Key::rsa("rsa-2"));
    let gateway = strict(&[&rsa, &second_rsa, &ec, &ed]);
    let mut client = gateway.client();
    let good = |other: Value| claims("alice", other);
    let head = |alg: &str, kid: &str| json!({ "alg": alg, "kid": kid });

    let valid = ed.token(&good(json!({})));
    let (message, signature) = valid.rsplit_once('.').unwrap();
    let (first, _) = message.split_once('.').unwrap();
    let eve = encode(good(json!({ "sub": "eve" })).to_string());
    let mut cases = vec![
        ("signed by another RSA key", other_rsa.token(&good(json!({}))), "signature"),
        ("signed by another Ed25519 key", other_ed.token(&good(json!({}))), "signature"),
        (
            "signed by another key of the set",
            second_rsa.token_with(&head("RS256", "rsa"), &good(json!({}))),
            "signature",
        ),
        ("other claims under the signature", format!("{first}.{eve}.{signature}"), "signature"),
        ("no signature", format!("{message}."), "signature"),
        ("unknown key", Key::ed("new").token(&good(json!({}))), "unknown key"),
        ("two keys might be meant", rsa.token_with(&json!({ "alg": "RS256" }), &good(json!({}))), "unknown key"),
        ("expired", ed.token(&good(json!({ "exp": in_seconds(-40) }))), "expired"),
        ("expired long ago", ed.token(&good(json!({ "exp": 0 }))), "expired"),
        ("expired before the epoch", ed.token(&good(json!({ "exp": -1e300 }))), "expired"),
        ("endless", ed.token(&good(json!({ "exp": null }))), "no expiration"),
        ("exp is a string", ed.token(&good(json!({ "exp": "9999999999" }))), "malformed"),
        ("not yet valid", ed.token(&good(json!({ "nbf": in_seconds(60) }))), "not valid yet"),
        ("nbf is a string", ed.token(&good(json!({ "nbf": "0" }))), "malformed"),
        ("another issuer", ed.token(&good(json!({ "iss": format!("{ISSUER}/") }))), "issuer"),
        ("no issuer", ed.token(&good(json!({ "iss": null }))), "issuer"),
        ("several issuers", ed.token(&good(json!({ "iss": [ISSUER] }))), "issuer"),
        ("another audience", ed.token(&good(json!({ "aud": "API" }))), "audience"),
        ("other audiences", ed.token(&good(json!({ "aud": ["a", "apis", 1] }))), "audience"),
        ("no audience", ed.token(&good(json!({ "aud": null }))), "audience"),
        ("none", signed(&json!({ "alg": "none" }), &good(json!({})), |_| Vec::new()), "malformed"),
        ("None with a key", signed(&head("None", "ed"), &good(json!({})), |_| Vec::new()), "malformed"),
        ("RS256 for an EC key", ec.token_with(&head("RS256", "ec"), &good(json!({}))), "algorithm"),
        ("EdDSA for an EC key", ed.token_with(&head("EdDSA", "ec"), &good(json!({}))), "algorithm"),
        ("RS512 for an RSA key", rsa.token_with(&head("RS512", "rsa"), &good(json!({}))), "algorithm"),
        ("PS256 for an RSA key", rsa.token_with(&head("PS256", "rsa"), &good(json!({}))), "algorithm"),
        (
            "HS256 without a key's name",
            signed(&json!({ "alg": "HS256" }), &good(json!({})), |m| hs256(b"", m)),
            "unknown key",
        ),
        (
            "a critical extension",
            ed.token_with(&json!({ "alg": "EdDSA", "kid": "ed", "crit": ["b64"] }), &good(json!({}))),
            "malformed",
        ),
        ("no token", String::new(), "malformed"),
        ("garbage", "garbage".to_owned(), "malformed"),
        ("dots", "..".to_owned(), "malformed"),
        ("two parts", message.to_owned(), "malformed"),
        ("four parts", format!("{valid}.x"), "malformed"),
        ("two tokens in a line", format!("{valid}, Bearer {valid}"), "malformed"),
        ("padded base64", format!("{message}.{signature}="), "malformed"),
        ("claims that are a list", ed.token(&json!([1])), "malformed"),
        ("a long one", format!("{message}.{}", "A".repeat(16 << 10)), "signature"),
    ];
    for (form, secret) in rsa.public_forms() {
        let forged = |head: &Value| signed(head, &good(json!({})), |message| hs256(&secret, message));
        cases.push((form, forged(&head("HS256", "rsa")), "algorithm"));
        cases.push((form, forged(&head("RS256", "rsa")), "signature"));
    }
    for (what, token, detail) in &cases {
        assert_invalid(&get(&mut client, token), detail, token, what);
    }
    let refused = client.get_with("/limited", &[("Authorization", "Bearer")]);
    assert_invalid(&refused, "malformed", "", "the scheme alone");
    let line = format!("Bearer {valid}");
    let twice = client.get_with("/limited", &[("Authorization", &line), ("authorization", &line)]);
    twice.assert_problem(400, "two Authorization headers");
    let other = client.get_with("/limited", &[("Authorization", &line), ("authorization", "Basic YTpi")]);
    other.assert_problem(400, "two Authorization headers with different schemes");

    assert_eq!(remaining(&get(&mut client, &valid)), (999, 999), "a rejected request uses no quota");
}

#[test]
fn small_clock_skew_is_allowed() {
    let key = Key::ed("ed");
    let gateway = strict(&[&key]);
    let mut client = gateway.client();
    for other in [json!({ "exp": in_seconds(-5) }), json!({ "nbf": in_seconds(5) }), json!({ "exp": 9e15 })] {
        let reply = get(&mut client, &key.token(&claims("alice", other.clone())));
        assert_eq!(reply.status, 200, "{other}: {}", reply.text());
    }
}

#[test]
fn token_with_an_audience_is_rejected_if_none_is_configured() {
    let key = Key::ec("ec");
    let gateway = Gateway::start_with(&config("jwks_file = \"jwks.json\"", ""), &[("jwks.json", &key_set(&[&key]))]);
    let mut client = gateway.client();
    for (other, detail) in [
        (json!({ "aud": null }), None),
        (json!({ "aud": null, "iss": null }), None),
        (json!({}), Some("audience")),
        (json!({ "aud": [] }), Some("audience")),
        (json!({ "aud": 7 }), Some("audience")),
    ] {
        let token = key.token(&claims("alice", other.clone()));
        let reply = get(&mut client, &token);
        match detail {
            None => assert_eq!(reply.status, 200, "{other}: {}", reply.text()),
            Some(detail) => assert_invalid(&reply, detail, &token, &other.to_string()),
        }
    }
}

#[test]
fn missing_token_or_claim_is_rejected_skipped_or_replaced_by_the_address() {
    let key = Key::ed("ed");
    let without = [json!(null), json!(""), json!([]), json!(["alice"]), json!({ "id": "alice" })];
    let without: Vec<_> = without.iter().map(|sub| key.token(&claims("", json!({ "sub": sub })))).collect();
    let explicit_null = {
        let mut claims = claims("", json!({}));
        claims["sub"] = Value::Null;
        key.token(&claims)
    };
    let mut lines: Vec<String> = without.iter().map(|token| format!("Bearer {token}")).collect();
    lines.extend([format!("Bearer {explicit_null}"), "Basic YTpi".to_owned(), "Bearers x".to_owned(), String::new()]);
    let alice = key.token(&claims("alice", json!({})));
    let forged = Key::ed("ed").token(&claims("alice", json!({})));
    for (on_missing, limited) in [("reject", None), ("skip", None), ("ip", Some(999))] {
        let jwt = format!("jwks_file = \"jwks.json\"\nissuer = \"{ISSUER}\"\naudience = \"api\"");
        let config = config(&jwt, &format!("on_missing = \"{on_missing}\""));
        let gateway = Gateway::start_with(&config, &[("jwks.json", &key_set(&[&key]))]);
        let mut client = gateway.client();
        let mut asked = vec![client.get("/limited")];
        asked.extend(lines.iter().map(|line| client.get_with("/limited", &[("Authorization", line)])));
        for (index, reply) in asked.iter().enumerate() {
            let what = format!("{on_missing}: {index}");
            match limited {
                _ if on_missing == "reject" => {
                    reply.assert_problem(401, &what);
                    assert_eq!(reply.header("www-authenticate"), Some("Bearer"), "{what}");
                    assert!(reply.text().contains("the claim `sub` of a bearer token is required"), "{}", reply.text());
                }
                Some(most) => {
                    assert_eq!(
                        remaining(reply),
                        (most - index as u64, most - index as u64),
                        "{what}: the IP address is the identity"
                    )
                }
                None => {
                    assert_eq!((reply.status, reply.remaining("all")), (200, 999 - index as u64), "{what}");
                    assert!(!reply.header("ratelimit").unwrap().contains("token"), "{what}: the limit does not apply");
                }
            }
        }
        assert_eq!(remaining(&get(&mut client, &alice)).0, 999, "{on_missing}: the subject has its own bucket");
        assert_invalid(
            &get(&mut client, &forged),
            "signature",
            &forged,
            &format!("{on_missing}: a bad token is not a missing one"),
        );
    }
}

#[test]
fn claims_of_any_name_are_read_by_every_limit_of_a_request() {
    let key = Key::ec("ec");
    let fixed = "algorithm = \"fixed-window\"\nstart = \"first-request\"\nquota = \"100/hour\"\n";
    let limit = |name: &str, rest: &str| format!("[limit.{name}]\n{fixed}{rest}\n");
    let route = |name: &str, limits: &str| {
        format!("[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nlimits = [{limits}]\nrespond = {{ status = 200 }}\n")
    };
    let gateway = Gateway::start_with(
        &[
            "[auth.tokens]\nkind = \"jwt\"\njwks_file = \"jwks.json\"\n".to_owned(),
            limit("user", "by = \"jwt:user_id\"\nexempt = [\"jwt:user_id=0\", \"jwt:user_id=root\"]"),
            limit("tenant", "by = [\"jwt:https://example.com/tenant\", \"jwt:admin\"]"),
            limit("header", "by = \"header:x-user\""),
            route("limited", "\"user\", \"tenant\"") + "identify = [\"tokens\"]\n",
            route("open", "\"header\""),
        ]
        .concat(),
        &[("jwks.json", &key_set(&[&key]))],
    );
    let mut client = gateway.client();
    for (user, tenant, admin, expected) in [
        (json!(7), json!("a"), json!(true), (Some(99), 99)),
        (json!(7), json!("a"), json!(false), (Some(98), 99)),
        (json!(7), json!("a"), json!(true), (Some(97), 98)),
        (json!(-7), json!("a"), json!(true), (Some(99), 97)),
        (json!(7.5), json!("b"), json!(true), (Some(99), 99)),
        (json!(18446744073709551615_u64), json!("b"), json!(true), (Some(99), 98)),
        (json!(18446744073709551614_u64), json!("b"), json!(true), (Some(99), 97)),
        (json!("jos\u{e9}"), json!("b"), json!(true), (Some(99), 96)),
        (json!(0), json!("b"), json!(true), (None, 95)),
        (json!("root"), json!("b"), json!(true), (None, 94)),
        (json!("root "), json!("b"), json!(true), (Some(99), 93)),
        (json!(true), json!("ab"), json!("c"), (Some(99), 99)),
        (json!(true), json!("a"), json!("bc"), (Some(98), 99)),
    ] {
        let claims = json!({
            "exp": in_seconds(300), "user_id": user, "https://example.com/tenant": tenant, "admin": admin,
        });
        let reply = get(&mut client, &key.token(&claims));
        assert_eq!(reply.status, 200, "{claims}: {}", reply.text());
        match expected.0 {
            Some(remaining) => assert_eq!(reply.remaining("user"), remaining, "{claims}"),
            None => assert!(!reply.header("ratelimit").unwrap().contains("user"), "{claims} is exempt"),
        }
        assert_eq!(reply.remaining("tenant"), expected.1, "{claims}");
    }
    // Without a provider on the route, the gateway does not read tokens.
    let reply = client.get_with("/open", &[("X-User", "7"), ("Authorization", "Bearer garbage")]);
    assert_eq!(reply.remaining("header"), 99);
}

#[test]
fn subjects_of_two_issuers_share_a_bucket_unless_the_limit_is_by_issuer() {
    let (one, other) = (Key::ed("one"), Key::ed("other"));
    let provider = |name: &str| {
        format!("[auth.{name}]\nkind = \"jwt\"\njwks_file = \"{name}.json\"\nissuer = \"https://{name}.example\"\n")
    };
    for (by, separate) in [("\"jwt:sub\"", false), ("[\"jwt:iss\", \"jwt:sub\"]", true)] {
        let config = format!(
            "{}{}[limit.token]\nby = {by}\nquota = \"1/hour\"\n\
             [[route]]\nname = \"limited\"\npath = \"/limited\"\nrequire = [\"staff\", \"partners\"]\nlimits = [\"token\"]\n\
             respond = {{ status = 200 }}\n",
            provider("staff"),
            provider("partners")
        );
        let files = [("staff.json", &*key_set(&[&one])), ("partners.json", &key_set(&[&other]))];
        let gateway = Gateway::start_with(&config, &files);
        let mut client = gateway.client();
        let mut status = |key: &Key, issuer: &str, sub: &str| {
            let claims = json!({ "sub": sub, "exp": in_seconds(300), "iss": issuer });
            get(&mut client, &key.token(&claims)).status
        };
        assert_eq!(status(&one, "https://staff.example", "alice"), 200, "{by}");
        let expected = if separate { 200 } else { 429 };
        assert_eq!(status(&other, "https://partners.example", "alice"), expected, "{by}");
        assert_eq!(status(&one, "https://staff.example", "alice"), 429, "{by}");
        assert_eq!(status(&other, "https://partners.example", "bob"), 200, "{by}");
    }
}

/// Return whether the gateway accepts a token that is signed with this key.
fn is_trusted(gateway: &Gateway, key: &Key) -> bool {
    match get(&mut gateway.client(), &key.token(&claims("alice", json!({})))).status {
        200 => true,
        401 => false,
        other => panic!("{other}\n{}", gateway.log()),
    }
}

/// Start a gateway. Its JWKS file and its access log are in the same directory of the test.
fn following(folder: &Path, file: &str) -> Gateway {
    let jwt = format!("jwks_file = \"{}\"\nissuer = \"{ISSUER}\"\naudience = \"api\"", folder.join(file).display());
    let log = format!("[log]\naccess = \"{}\"\n", folder.join("access.log").display());
    Gateway::start(&(config(&jwt, "") + &log))
}

/// Replace a file by renaming.
fn put(folder: &Path, name: &str, content: &str) {
    let new = folder.join(format!("{name}.new"));
    std::fs::write(&new, content).unwrap();
    std::fs::rename(new, folder.join(name)).unwrap();
}

#[test]
fn replaced_jwks_file_takes_effect_and_an_invalid_one_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new, last) = (Key::ed("old"), Key::ec("new"), Key::ed("last"));
    put(folder.path(), "jwks.json", &key_set(&[&old]));
    let gateway = following(folder.path(), "jwks.json");
    let reloads = || gateway.log().matches("reloaded").count();
    assert!(is_trusted(&gateway, &old) && !is_trusted(&gateway, &new), "the old key is used at first");

    put(folder.path(), "jwks.json", &key_set(&[&new]));
    eventually("the new key is used", || is_trusted(&gateway, &new));
    assert!(!is_trusted(&gateway, &old), "the old key is rejected");

    for (content, reason) in [
        ("{ \"keys\": [", "not a JSON Web Key Set"),
        ("", "not a JSON Web Key Set"),
        ("{ \"keys\": [] }", "no key for RS256"),
        ("{ \"keys\": [{ \"kty\": \"oct\", \"k\": \"c2VjcmV0\" }] }", "keys[0] is symmetric"),
    ] {
        let warnings = gateway.log().matches("cannot reload the file").count();
        put(folder.path(), "jwks.json", content);
        eventually(reason, || gateway.log().matches("cannot reload the file").count() > warnings);
        let log = gateway.log();
        let line = log.lines().rev().find(|line| line.contains("cannot reload the file")).unwrap();
        assert!(line.contains(reason) && line.contains("jwks.json") && line.contains("WARN"), "{reason}: {line}");
        assert!(is_trusted(&gateway, &new) && !is_trusted(&gateway, &old), "{reason}: the keys do not change");
    }
    // A missing file leaves the keys unchanged. The gateway logs the missing file once, even if other files of the
    // directory change.
    std::fs::remove_file(folder.path().join("jwks.json")).unwrap();
    eventually("the removal of the file is detected", || gateway.log().contains("cannot read the file"));
    assert!(is_trusted(&gateway, &new), "the keys do not change");
    put(folder.path(), "other.json", "");
    put(folder.path(), "jwks.json", &key_set(&[&last]));
    eventually("the last key is used", || is_trusted(&gateway, &last));
    assert!(!is_trusted(&gateway, &new));
    assert_eq!(gateway.log().matches("cannot read the file").count(), 1, "{}", gateway.log());
    eventually("the reload is logged", || reloads() >= 2);
    assert_eq!(reloads(), 2, "one reload per change:\n{}", gateway.log());
    assert_eq!(
        gateway.log().matches("cannot reload the file").count(),
        4,
        "one warning per invalid file:\n{}",
        gateway.log()
    );
}

#[test]
fn replaced_symlink_of_jwks_takes_effect() {
    // Kubernetes mounts files through two symlinks: `jwks.json` → `..data/jwks.json`, and `..data` → a directory with a
    // generated name.
    let folder = tempfile::tempdir().unwrap();
    let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, folder.path().join(name)).unwrap();
    let revision = |name: &str, key: &Key| {
        std::fs::create_dir(folder.path().join(name)).unwrap();
        put(&folder.path().join(name), "jwks.json", &key_set(&[key]));
    };
    let (old, new) = (Key::ed("old"), Key::ed("new"));
    revision("..2026_01", &old);
    link("..2026_01", "..data");
    link("..data/jwks.json", "jwks.json");
    let gateway = following(folder.path(), "jwks.json");
    assert!(is_trusted(&gateway, &old) && !is_trusted(&gateway, &new), "the old key is used at first");
    revision("..2026_02", &new);
    link("..2026_02", "..data_tmp");
    std::fs::rename(folder.path().join("..data_tmp"), folder.path().join("..data")).unwrap();
    std::fs::remove_dir_all(folder.path().join("..2026_01")).unwrap();
    eventually("the new key is used", || is_trusted(&gateway, &new));
    assert!(!is_trusted(&gateway, &old), "the old key is rejected");
    eventually("the reload is logged", || gateway.log().contains("reloaded"));
    assert_eq!(gateway.log().matches("reloaded").count(), 1, "{}", gateway.log());
}
