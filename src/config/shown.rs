//! A configuration for eyes that must not see its secrets.

use serde_json::Value;

use super::secrets::{MASK, is_secret, redact};

/// What a file says, as it is written: variables by their names, secrets masked.
///
/// # Errors
/// It is no TOML.
pub fn redacted_config(text: &str) -> Result<Value, toml::de::Error> {
    let mut value = toml::from_str(text)?;
    redact_value(&mut value, &mut Vec::new());
    Ok(value)
}

fn redact_value<'k>(value: &'k mut Value, path: &mut Vec<&'k str>) {
    match value {
        Value::String(text) if text.is_empty() => {}
        Value::String(text) if is_secret(path, text) => *text = MASK.to_owned(),
        Value::String(text) => *text = redact(text),
        Value::Array(items) => {
            for item in items {
                redact_value(item, path);
            }
        }
        Value::Object(table) => {
            for (key, value) in table {
                path.push(key);
                redact_value(value, path);
                path.pop();
            }
        }
        Value::Bool(_) | Value::Number(_) if is_secret(path, "") => *value = MASK.into(),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
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
        let shown = redacted_config(text).unwrap();
        assert!(!shown.to_string().contains("planted"), "{shown}");
        for (pointer, expected) in [
            ("/admin/address", "127.0.0.1:9180"),
            ("/admin/token", "***"),
            ("/store/url", "redis+sentinel://***@h1,h2/mymaster?sentinel_password=***"),
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
