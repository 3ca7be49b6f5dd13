//! A configuration for eyes that must not see its secrets.

use serde_json::Value;

/// What stands for a secret.
const MASK: &str = "***";

/// Keys whose values are secrets, whatever table they stand in.
const SECRETS: [&str; 2] = ["token", "secret"];

/// Header fields that routes set: there may be credentials among them.
const RULES: [&str; 2] = ["request_headers", "response_headers"];

/// What a file says, as it is written: variables by their names, secrets masked.
///
/// # Errors
/// It is no TOML.
pub fn masked(text: &str) -> Result<Value, toml::de::Error> {
    let mut value = toml::from_str(text)?;
    mask(&mut value);
    Ok(value)
}

fn mask(value: &mut Value) {
    match value {
        Value::String(text) => mask_url(text),
        Value::Array(items) => items.iter_mut().for_each(mask),
        Value::Object(table) => {
            for (key, value) in table {
                match value {
                    Value::String(text) if SECRETS.contains(&key.as_str()) && !text.is_empty() => {
                        *text = MASK.to_owned()
                    }
                    Value::Object(rules) if RULES.contains(&key.as_str()) => {
                        if let Some(Value::Object(set)) = rules.get_mut("set") {
                            set.values_mut().for_each(|value| *value = MASK.into());
                        }
                    }
                    _ => mask(value),
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Who logs on where, and what is said behind the `?`: that may be a password as well.
fn mask_url(text: &mut String) {
    let Some(start) = text.find("://").map(|at| at + 3) else { return };
    if let Some(query) = text[start..].find('?').map(|at| start + at + 1) {
        text.replace_range(query.., MASK);
    }
    if let Some(host) = text[start..].rfind('@').map(|at| start + at) {
        text.replace_range(start..host, MASK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_secret_is_shown_and_everything_else_is() {
        let text = "[admin]\naddress = \"127.0.0.1:9180\"\ntoken = \"planted\"\n\
                    [store]\nurl = \"redis+sentinel://user:planted@h1,h2/mymaster?sentinel_password=planted\"\nsecret = \"${S:-planted}\"\n\
                    [server]\nworkers = 2\n[api_key]\nconsumers = \"consumers.toml\"\n\
                    [upstream.api]\nservers = [\"http://${HOST}:80\", { url = \"https://a:planted@b\", weight = 2 }]\n\
                    [[route]]\nname = \"r\"\npath = \"/?\"\nrequest_headers.set = { authorization = \"planted\" }\n\
                    response_headers = { set = { x-a = \"planted\" }, remove = [\"server\"] }\n";
        let shown = masked(text).unwrap();
        assert!(!shown.to_string().contains("planted"), "{shown}");
        for (pointer, expected) in [
            ("/admin/address", "127.0.0.1:9180"),
            ("/admin/token", "***"),
            ("/store/url", "redis+sentinel://***@h1,h2/mymaster?***"),
            ("/store/secret", "***"),
            ("/api_key/consumers", "consumers.toml"),
            ("/upstream/api/servers/0", "http://${HOST}:80"),
            ("/upstream/api/servers/1/url", "https://***@b"),
            ("/route/0/path", "/?"),
            ("/route/0/request_headers/set/authorization", "***"),
            ("/route/0/response_headers/remove/0", "server"),
        ] {
            assert_eq!(shown.pointer(pointer), Some(&expected.into()), "{pointer} in {shown}");
        }
        assert_eq!(shown["server"]["workers"], 2);
    }
}
