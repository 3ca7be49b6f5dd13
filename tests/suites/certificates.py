"""Certificates for the suites, signed by a test CA."""

from datetime import datetime, timedelta, timezone

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

USAGES = ["content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"]


class Certificate:
    """A certificate with its key. Without `usage`, it is a CA certificate, otherwise it is for a server or a client. Without `issuer`, it is
    self-signed."""

    def __init__(self, name, issuer=None, key=None, usage=None):
        self.key = key or ec.generate_private_key(ec.SECP256R1())
        public, signing = self.key.public_key(), issuer.key if issuer else self.key
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.now(timezone.utc)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer.certificate.subject if issuer else subject)
        builder = builder.public_key(public).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=90))
        builder = builder.add_extension(x509.BasicConstraints(usage is None, None), critical=True)
        of_key = x509.KeyUsage(digital_signature=usage is not None, key_cert_sign=usage is None, crl_sign=usage is None, **dict.fromkeys(USAGES, False))
        builder = builder.add_extension(of_key, critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        if usage:
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            # The URL of the revocation list does not have to work, because no program of the suites fetches it.
            point = x509.DistributionPoint([x509.UniformResourceIdentifier("http://ca.test/list.crl")], None, None, None)
            builder = builder.add_extension(x509.CRLDistributionPoints([point]), critical=False)
        self.certificate = builder.sign(signing, hashes.SHA256())

    def bytes(self, encoding=serialization.Encoding.DER):
        return self.certificate.public_bytes(encoding)

    def write(self, path, key=None, chain=()):
        """Write the certificate, the other certificates of its chain, and its key."""
        path.write_bytes(b"".join(each.bytes(serialization.Encoding.PEM) for each in (self, *chain)))
        if key:
            form = serialization.PrivateFormat.PKCS8
            key.write_bytes(self.key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
