//! Key files of service accounts of Google Cloud, in the format of
//! <https://cloud.google.com/iam/docs/keys-create-delete>.

use aws_lc_rs::encoding::{AsDer, Pkcs8V1Der};
use aws_lc_rs::rsa::{KeyPair, KeySize};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;

pub const EMAIL: &str = "gateway@project-1.iam.gserviceaccount.com";

/// Generate a key. Return it with its file for this token endpoint.
pub fn generate(token_uri: &str) -> (KeyPair, String) {
    let key = KeyPair::generate(KeySize::Rsa2048).unwrap();
    let der = BASE64_STANDARD.encode(AsDer::<Pkcs8V1Der<'_>>::as_der(&key).unwrap().as_ref());
    let file = serde_json::json!({
        "type": "service_account",
        "project_id": "project-1",
        "private_key_id": "key-1",
        "private_key": format!("-----BEGIN PRIVATE KEY-----\n{der}\n-----END PRIVATE KEY-----\n"),
        "client_email": EMAIL,
        "token_uri": token_uri,
        "universe_domain": "googleapis.com",
    });
    (key, file.to_string())
}
