//! Keys of a JWT issuer and signed tokens. They are made without the JWT library that the gateway uses.

use aws_lc_rs::encoding::{AsDer, PublicKeyX509Der};
use aws_lc_rs::hmac;
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair, RSA_PKCS1_SHA256, RsaKeyPair,
};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};

/// A key pair with a key ID.
pub struct Key {
    pub id: String,
    pair: Pair,
}

enum Pair {
    Rsa(RsaKeyPair),
    Ec(EcdsaKeyPair),
    Ed(Ed25519KeyPair),
}

impl Key {
    pub fn rsa(id: &str) -> Key {
        Key { id: id.to_owned(), pair: Pair::Rsa(RsaKeyPair::generate(KeySize::Rsa2048).unwrap()) }
    }

    pub fn ec(id: &str) -> Key {
        let pair = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap();
        Key { id: id.to_owned(), pair: Pair::Ec(pair) }
    }

    pub fn ed(id: &str) -> Key {
        Key { id: id.to_owned(), pair: Pair::Ed(Ed25519KeyPair::generate().unwrap()) }
    }

    pub fn algorithm(&self) -> &'static str {
        match self.pair {
            Pair::Rsa(_) => "RS256",
            Pair::Ec(_) => "ES256",
            Pair::Ed(_) => "EdDSA",
        }
    }

    /// Return the public key as a JWK.
    pub fn jwk(&self) -> Value {
        match &self.pair {
            Pair::Rsa(pair) => {
                let modulus = pair.public_key().modulus().big_endian_without_leading_zero();
                let exponent = pair.public_key().exponent().big_endian_without_leading_zero();
                json!({ "kty": "RSA", "kid": self.id, "n": encode(modulus), "e": encode(exponent) })
            }
            Pair::Ec(pair) => {
                let (x, y) = pair.public_key().as_ref()[1..].split_at(32);
                json!({ "kty": "EC", "crv": "P-256", "kid": self.id, "x": encode(x), "y": encode(y) })
            }
            Pair::Ed(pair) => {
                json!({ "kty": "OKP", "crv": "Ed25519", "kid": self.id, "x": encode(pair.public_key()) })
            }
        }
    }

    /// Return encodings of the public RSA key. A careless verifier might use one of them as an HMAC secret.
    pub fn public_forms(&self) -> Vec<(&'static str, Vec<u8>)> {
        let Pair::Rsa(pair) = &self.pair else { panic!("the key is not an RSA key") };
        let spki: PublicKeyX509Der<'_> = pair.public_key().as_der().unwrap();
        let text = STANDARD.encode(spki.as_ref());
        let lines: Vec<_> = text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap()).collect();
        let pem = format!("-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n", lines.join("\n"));
        vec![
            ("PEM", pem.into_bytes()),
            ("X.509 DER", spki.as_ref().to_vec()),
            ("PKCS#1 DER", pair.public_key().as_ref().to_vec()),
            ("modulus", pair.public_key().modulus().big_endian_without_leading_zero().to_vec()),
            ("JWK", self.jwk().to_string().into_bytes()),
        ]
    }

    pub fn signature(&self, message: &[u8]) -> Vec<u8> {
        match &self.pair {
            Pair::Rsa(pair) => {
                let mut signature = vec![0; pair.public_modulus_len()];
                pair.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), message, &mut signature).unwrap();
                signature
            }
            Pair::Ec(pair) => pair.sign(&SystemRandom::new(), message).unwrap().as_ref().to_vec(),
            Pair::Ed(pair) => pair.sign(message).as_ref().to_vec(),
        }
    }

    /// Return a token whose header names the type `JWT`, the algorithm and the key ID.
    pub fn token(&self, claims: &Value) -> String {
        self.token_with(&json!({ "typ": "JWT", "alg": self.algorithm(), "kid": self.id }), claims)
    }

    /// Return a token with this header.
    pub fn token_with(&self, head: &Value, claims: &Value) -> String {
        signed(head, claims, |message| self.signature(message))
    }
}

/// Return the JWK Set of the public keys.
pub fn key_set(keys: &[&Key]) -> String {
    json!({ "keys": keys.iter().map(|key| key.jwk()).collect::<Vec<_>>() }).to_string()
}

/// Return a token. `sign` computes its signature from the header and the claims.
pub fn signed(head: &Value, claims: &Value, sign: impl FnOnce(&[u8]) -> Vec<u8>) -> String {
    let message = format!("{}.{}", encode(head.to_string()), encode(claims.to_string()));
    let signature = sign(message.as_bytes());
    format!("{message}.{}", encode(signature))
}

/// Return the HMAC-SHA-256 of a message.
pub fn hs256(secret: &[u8], message: &[u8]) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), message).as_ref().to_vec()
}

/// Encode as base64url without padding.
pub fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// Return the Unix time `seconds` from now.
pub fn in_seconds(seconds: i64) -> i64 {
    std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs() as i64 + seconds
}
